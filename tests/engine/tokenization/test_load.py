"""Which tokenizer comes of which files, against transformers on the same files."""

import io
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from dovetail.contracts.errors import ConfigError, ModelError, RequestError
from dovetail.contracts.weights import TokenizerFiles
from dovetail.engine.tokenization.detokenizer import create_detokenizer
from dovetail.engine.tokenization.load import load_tokenizer
from dovetail.engine.tokenization.tokenizer import Tokenizer

TEXTS = ["the quick brown fox", "  two  spaces", "日本語 é 😀", "1234", "a\n\tb", "<s>the</s>", ""]


def load(files: TokenizerFiles | None, mode: str = "auto", override: str | None = None) -> Tokenizer:
    tokenizer = load_tokenizer(files, mode, override)
    assert tokenizer is not None
    return tokenizer


def write(directory: Path, source: str, **config: Any) -> TokenizerFiles:
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(source, encoding="utf-8")
    content = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    return TokenizerFiles(directory=directory)


def assert_same(tokenizer: Tokenizer, oracle: Any) -> None:
    for text in TEXTS:
        for adds in (True, False):
            assert tokenizer.encode(text, add_special_tokens=adds) == oracle.encode(text, add_special_tokens=adds)
        ids = tokenizer.encode(text)
        for skips in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skips) == oracle.decode(ids, skip_special_tokens=skips)


def varint(value: int) -> bytes:
    """A number of a protocol buffer."""
    value %= 1 << 64
    parts = []
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def field(number: int, value: int | float | str | bytes) -> bytes:
    """A field of a protocol buffer."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    raw = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(raw)) + raw


def sentencepiece_file(source: str, *, kind: int = 2, adds_space: bool = True) -> bytes:
    """The file that SentencePiece would write of a tokenizer in JSON."""
    model = json.loads(source)["model"]
    merged = ["".join(pair) for pair in model["merges"]]
    pieces = b""
    for text in model["vocab"]:
        type_ = 2 if text == "<unk>" else 3 if text in ("<s>", "</s>") else 6 if text.startswith("<0x") else 1
        score = -float(merged.index(text)) if text in merged else -1000.0
        pieces += field(1, field(1, text) + field(2, score) + field(3, type_))
    trainer = field(3, kind) + field(35, 1) + field(40, 0) + field(41, 1) + field(42, 2) + field(43, -1)
    return pieces + field(2, trainer) + field(3, field(1, "identity") + field(3, int(adds_space)) + field(4, 0))


STORIES = Path(__file__).resolve().parents[3] / ".." / "shared" / "models" / "stories15M" / "hf-fp16"
"""A trained checkpoint, tried too where it is."""


@pytest.fixture(params=["made", *(["stories15M"] if STORIES.is_dir() else [])])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path, tokenizer_jsons: dict[str, str]) -> Path:
    """A directory with the tokenizer of a Llama 2, in both of its files."""
    if request.param == "stories15M":
        return STORIES
    source = tokenizer_jsons["sentencepiece"]
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    content = json.loads(source) | {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, bos, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        }
    }
    directory = tmp_path / "made"
    specials = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    write(directory, json.dumps(content), clean_up_tokenization_spaces=False, **specials)
    (directory / "tokenizer.model").write_bytes(sentencepiece_file(source))
    return directory


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"additional_special_tokens": ["the"]},
    ],
)
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_a_directory_gives_what_transformers_gives(
    kind: str, flags: dict[str, Any], tmp_path: Path, tokenizer_jsons: dict[str, str]
) -> None:
    names = {"byte_level": ("<|im_start|>", "<|im_end|>"), "sentencepiece": ("<s>", "</s>")}[kind]
    files = write(tmp_path, tokenizer_jsons[kind], bos_token=names[0], eos_token=names[1], **flags)
    tokenizer = load(files)
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert_same(tokenizer, oracle)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (oracle.bos_token_id, oracle.eos_token_id)
    assert tokenizer.special_token_ids == set(oracle.all_special_ids) | {
        index for index, token in oracle.added_tokens_decoder.items() if token.special
    }
    assert tokenizer.vocab_size == len(oracle)
    own, given = json.loads(tokenizer.tokenizer_json or ""), json.loads(tokenizer_jsons[kind])
    added, expected = own.pop("added_tokens"), given.pop("added_tokens")
    assert {token["id"] for token in added if token["special"]} == tokenizer.special_token_ids
    assert [token for token in added if token["content"] != "the"] == expected


def test_a_real_checkpoint(checkpoint: Path) -> None:
    tokenizer = load(TokenizerFiles(directory=checkpoint))
    assert_same(tokenizer, transformers.AutoTokenizer.from_pretrained(checkpoint))
    assert tokenizer.id_to_token(tokenizer.token_to_id("\u2581the") or 0) == "\u2581the"
    assert tokenizer.id_to_token(10**6) is None
    assert tokenizer.token_to_id("no such token") is None


def test_slow_mode_goes_through_transformers(checkpoint: Path) -> None:
    tokenizer = load(TokenizerFiles(directory=checkpoint), mode="slow")
    assert_same(tokenizer, transformers.AutoTokenizer.from_pretrained(checkpoint, use_fast=False))
    ids = tokenizer.encode("Once upon a time, 日本", add_special_tokens=False)
    detokenizer = create_detokenizer(tokenizer)
    text = "".join(detokenizer.push([token]) for token in ids) + detokenizer.finish()
    assert text == "Once upon a time, 日本"
    # 本 has no token of its own: it is three bytes.
    continued = create_detokenizer(tokenizer, ids[:-1])
    assert continued.push(ids[-1:]) + continued.finish() == "本"


def test_a_sentencepiece_model_alone_is_converted(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((checkpoint / "tokenizer.model").read_bytes())
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load(TokenizerFiles(directory=tmp_path))
    assert_same(tokenizer, load(TokenizerFiles(directory=checkpoint)))
    assert tokenizer.special_tokens == load(TokenizerFiles(directory=checkpoint)).special_tokens


@pytest.mark.parametrize(
    ("config", "added"),
    [({}, {}), ({"add_bos_token": False}, {}), ({"add_eos_token": True}, {}), ({}, {"<extra>": 999})],
)
def test_a_sentencepiece_model_needs_no_library(
    config: dict[str, Any], added: dict[str, int], tmp_path: Path, tokenizer_jsons: dict[str, str]
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file(tokenizer_jsons["sentencepiece"]))
    if config:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if added:
        (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    tokenizer = load(TokenizerFiles(directory=tmp_path))
    original = load(TokenizerFiles(tokenizer_json=tokenizer_jsons["sentencepiece"]))
    first = [1] if config.get("add_bos_token", True) else []
    last = [2] if config.get("add_eos_token") else []
    for text in TEXTS:
        ids = original.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text) == [*first, *ids, *last]
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == original.decode(ids)
    assert tokenizer.special_tokens == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    num_pieces = original.vocab_size
    assert [tokenizer.token_to_id(text) for text in added] == [num_pieces] * len(added)


@pytest.mark.parametrize("cut", [1, 40, 500])
def test_a_damaged_sentencepiece_model_is_named(cut: int, tmp_path: Path, tokenizer_jsons: dict[str, str]) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(sentencepiece_file(tokenizer_jsons["sentencepiece"])[:-cut])
    with pytest.raises(ModelError, match="tokenizer"):
        load_tokenizer(TokenizerFiles(directory=tmp_path), "auto")


def test_bos_of_metadata_is_put_in_front_once(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.encode("the")[0] == 1
    assert sentencepiece.encode("the")[1:] == sentencepiece.encode("the", add_special_tokens=False)


def test_saved_truncation_and_padding_do_not_apply(tmp_path: Path, tokenizer_jsons: dict[str, str]) -> None:
    content = json.loads(tokenizer_jsons["byte_level"])
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer = load(write(tmp_path, json.dumps(content)))
    assert tokenizer.decode(tokenizer.encode("in the world")) == "in the world"


def test_mode_none_has_no_tokenizer(checkpoint: Path) -> None:
    assert load_tokenizer(None, "none") is None
    assert load_tokenizer(TokenizerFiles(directory=checkpoint), "none") is None


def test_an_override_wins(tmp_path: Path, tokenizer_jsons: dict[str, str]) -> None:
    write(tmp_path / "mine", tokenizer_jsons["byte_level"])
    tokenizer = load(TokenizerFiles(tokenizer_json=tokenizer_jsons["sentencepiece"]), override=str(tmp_path / "mine"))
    assert tokenizer.token_to_id("<think>") == 2
    with pytest.raises(ModelError, match=r"model\.tokenizer: .*absent is not a directory"):
        load_tokenizer(None, "auto", str(tmp_path / "absent"))


def test_a_model_without_tokenizer_says_what_to_do() -> None:
    with pytest.raises(ModelError, match=r"give model\.tokenizer .*or set model\.tokenizer_mode to none"):
        load_tokenizer(None, "auto")


def test_an_unknown_mode_lists_the_modes() -> None:
    with pytest.raises(ConfigError, match="must be one of auto, slow, mistral, none, got 'fast'"):
        load_tokenizer(None, "fast")


def test_slow_mode_is_refused_for_metadata(tokenizer_jsons: dict[str, str]) -> None:
    with pytest.raises(ModelError, match="tokenizer_mode slow needs a directory"):
        load_tokenizer(TokenizerFiles(tokenizer_json=tokenizer_jsons["byte_level"]), "slow")


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_broken_files_are_named(file: str, content: str, tmp_path: Path, tokenizer_jsons: dict[str, str]) -> None:
    files = write(tmp_path, tokenizer_jsons["byte_level"])
    (tmp_path / file).write_text(content)
    with pytest.raises(ModelError, match=file):
        load_tokenizer(files, "auto")


def test_files_that_nobody_can_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"nothing")
    with pytest.raises(ModelError, match=f"{tmp_path}/tokenizer.model is damaged, or no file of SentencePiece"):
        load_tokenizer(TokenizerFiles(directory=tmp_path), "auto")


def write_evil(directory: Path, **config: Any) -> Path:
    """A tokenizer with code of its own; returns the file that the code would write."""
    trace = directory / "it-ran"
    (directory / "tokenization_evil.py").write_text(
        f"open({str(trace)!r}, 'w').close()\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "class EvilTokenizer(PreTrainedTokenizerFast): pass\n"
    )
    (directory / "vocab.txt").write_text("a\nb\n")
    reference = "tokenization_evil.EvilTokenizer"
    for name, content in {"tokenizer_config.json": {"tokenizer_class": "EvilTokenizer"}, "config.json": {}}.items():
        auto_map = {"AutoTokenizer": [reference, reference], "AutoConfig": reference}
        (directory / name).write_text(json.dumps({"auto_map": auto_map, **content, **config}))
    return trace


@pytest.mark.parametrize("mode", ["auto", "slow"])
@pytest.mark.parametrize("config", [{}, {"model_type": "llama"}], ids=["unknown", "llama"])
def test_code_of_a_checkpoint_is_never_run_and_nobody_is_asked(
    mode: str, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = write_evil(tmp_path, **config)
    answers = io.StringIO("y\n" * 9)
    monkeypatch.setattr(sys, "stdin", answers)
    with pytest.raises(
        ModelError, match=r"Python code of the checkpoint \(tokenization_evil.EvilTokenizer\).*never run"
    ):
        load_tokenizer(TokenizerFiles(directory=tmp_path), mode)
    assert not trace.exists()
    assert answers.tell() == 0


def test_a_sentencepiece_file_says_which_library_reads_it(
    tmp_path: Path, tokenizer_jsons: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unigram = sentencepiece_file(tokenizer_jsons["sentencepiece"], kind=1)
    (tmp_path / "tokenizer.model").write_bytes(unigram)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ModelError, match=r"to read tokenizer\.model takes libraries .*: pip install sentencepiece"):
        load_tokenizer(TokenizerFiles(directory=tmp_path), "auto")


def test_lone_surrogates_are_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        byte_level.encode("a\ud800")


def test_neither_torch_nor_transformers_is_needed(tmp_path: Path, tokenizer_jsons: dict[str, str]) -> None:
    write(tmp_path, tokenizer_jsons["byte_level"])
    code = (
        "import sys; from pathlib import Path; from dovetail.contracts.weights import TokenizerFiles;"
        "from dovetail.engine.tokenization.load import load_tokenizer;"
        f"t = load_tokenizer(TokenizerFiles(directory=Path({str(tmp_path)!r})), 'auto'); t.decode(t.encode('the'));"
        "print([name for name in ('torch', 'transformers', 'jinja2') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
