"""Tokenizers from GGUF metadata: the ids must be llama.cpp's, which are those of the original tokenizers."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, trainers

from dovetail.contracts.errors import ModelError
from dovetail.contracts.weights import ModelFiles, TokenizerFiles
from dovetail.engine.tokenization.load import load_tokenizer_of
from dovetail.plugins.weight_formats.gguf import GGUFFormat
from dovetail.plugins.weight_formats.gguf.header import Header
from dovetail.plugins.weight_formats.gguf.pretokenizers import PRE_TOKENIZERS
from dovetail.plugins.weight_formats.gguf.texts import Texts
from dovetail.plugins.weight_formats.gguf.vocabulary import build_tokenizer

EXPECTED = json.loads((Path(__file__).parent / "data" / "llama_cpp_ids.json").read_text(encoding="utf-8"))


def byte_level(pre: str, **values: Any) -> dict[str, Any]:
    """Metadata of the small vocabulary of the expected ids."""
    tokens = EXPECTED["vocabulary"]
    kinds = [3, 3, 3] + [1] * (len(tokens) - 3)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds),
        "tokenizer.ggml.merges": EXPECTED["merges"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.{key}": value for key, value in values.items()},
    }


def built(metadata: dict[str, Any]) -> TokenizerFiles | None:
    values = {key: Texts.of(value) if isinstance(value, list) else value for key, value in metadata.items()}
    return build_tokenizer(Header(Path("test.gguf"), values, ()))


def load(metadata: dict[str, Any]) -> Tokenizer:
    files = built(metadata)
    assert files is not None
    assert files.tokenizer_json is not None
    return Tokenizer.from_str(files.tokenizer_json)


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


@pytest.mark.parametrize("pre", EXPECTED["small"])
def test_ids_are_those_of_llama_cpp(pre: str) -> None:
    found = encode(load(byte_level(pre)), EXPECTED["texts"])
    for text, ids, expected in zip(EXPECTED["texts"], found, EXPECTED["small"][pre], strict=True):
        # For Mistral's tekken llama.cpp forgets combining marks, for Qwen to compose them; there the original
        # tokenizer's rule is right.
        if pre not in ("tekken", "qwen2") or not any(unicodedata.category(char).startswith("M") for char in text):
            assert ids == expected, text


def test_qwen_composes_characters_as_its_original_tokenizer_does() -> None:
    composed, apart = "caf\u00e9 \u1e69", "cafe\u0301 s\u0323\u0307"
    one, other = encode(load(byte_level("qwen2")), [composed, apart])
    assert one == other
    one, other = encode(load(byte_level("gpt-2")), [composed, apart])
    assert one != other


def test_a_tokenizer_that_cannot_be_built_is_done_without(
    tmp_path: Path, tiny_model: Any, gguf_format: GGUFFormat
) -> None:
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "of-tomorrow",
        "tokenizer.ggml.tokens": ["a", "b"],
    }
    files = tiny_model(values=values)
    with pytest.raises(ModelError, match=r"'of-tomorrow' is not known.*or model\.tokenizer_mode to none"):
        load_tokenizer_of(gguf_format, files, "auto")
    assert load_tokenizer_of(gguf_format, files, "none") is None
    found = built(byte_level("gpt-2"))
    assert found is not None
    assert found.tokenizer_json is not None
    (tmp_path / "tokenizer.json").write_text(found.tokenizer_json, encoding="utf-8")
    tokenizer = load_tokenizer_of(gguf_format, files, "auto", str(tmp_path))
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("the")) == "the"


def test_arrays_of_strings_are_as_they_were() -> None:
    strings = ["", "a", "caf\u00e9", "\u0120the", " "]
    texts = Texts.of(strings)
    assert texts.decoded() == list(texts) == strings
    assert (texts[2], texts[-1], texts[1:3]) == ("caf\u00e9", " ", strings[1:3])
    with pytest.raises(IndexError):
        texts[5]


def test_smollm2_ids_are_those_of_llama_cpp(smollm2: ModelFiles, gguf_format: GGUFFormat) -> None:
    files = gguf_format.tokenizer(smollm2)
    assert files is not None
    assert files.tokenizer_json is not None
    assert encode(Tokenizer.from_str(files.tokenizer_json), EXPECTED["texts"]) == EXPECTED["smollm2"]
    assert (files.bos_token_id, files.eos_token_id, files.add_bos_token) == (1, 2, False)
    assert files.chat_template is not None
    assert "<|im_start|>" in files.chat_template


def test_smollm_splits_every_digit_and_llama3_in_threes() -> None:
    def words(pre: str, text: str) -> list[str]:
        return [word for word, _ in load(byte_level(pre)).pre_tokenizer.pre_tokenize_str(text)]

    assert words("smollm", "in 1234 ½") == ["in", "Ġ", "1", "2", "3", "4", "Ġ", "Â½"]
    assert words("gpt-2", "in 1234") == ["in", "Ġ1234"]
    assert words("llama-bpe", "in 12345") == ["in", "Ġ", "123", "45"]
    assert words("qwen2", "in 123\n\n x") == ["in", "Ġ", "1", "2", "3", "ĊĊ", "Ġx"]
    assert words("tekken", "camelCase HTTPServer") == ["camel", "Case", "ĠHTTPServer"]


def test_every_text_comes_back() -> None:
    for pre in PRE_TOKENIZERS:
        tokenizer = load(byte_level(pre))
        for text, ids in zip(EXPECTED["texts"], encode(tokenizer, EXPECTED["texts"]), strict=True):
            composed = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
            assert tokenizer.decode(ids, skip_special_tokens=False) == composed


def test_bos_is_in_front_where_the_file_or_the_kind_says_so() -> None:
    def adds_bos(pre: str, **values: Any) -> bool:
        files = built(byte_level(pre, **values))
        assert files is not None
        return files.add_bos_token

    assert adds_bos("llama-bpe")
    assert not adds_bos("llama-bpe", **{"ggml.add_bos_token": False})
    assert not adds_bos("qwen2")
    assert adds_bos("qwen2", **{"ggml.add_bos_token": True})


def test_eos_is_appended_where_the_file_says_so() -> None:
    tokenizer = load(byte_level("gpt-2", **{"ggml.add_eos_token": True}))
    assert tokenizer.encode("the").ids[-1] == 2
    assert tokenizer.encode("the", add_special_tokens=False).ids[-1] != 2


def test_user_defined_tokens_are_found_but_not_special() -> None:
    metadata = byte_level("gpt-2")
    metadata["tokenizer.ggml.token_type"][1] = 4
    tokenizer = load(metadata)
    ids = tokenizer.encode("a<|im_start|>b<|im_end|>").ids
    assert {1, 2} <= set(ids)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<|im_start|>b"


def sentencepiece_metadata(directory: Path) -> dict[str, Any]:
    """What a converter writes for a SentencePiece vocabulary, from the same vocabulary's tokenizer.json."""
    model = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        ranks.setdefault("".join(pair), rank)
    kinds = [2, 3, 3] + [6 if token.startswith("<0x") else 1 for token in tokens[3:]]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([-float(ranks.get(token, 10**6)) for token in tokens]),
        "tokenizer.ggml.token_type": np.array(kinds),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def write_llama_tokenizer(directory: Path) -> None:
    """A tokenizer.json of Llama 2's form, learnt from the expected texts: merges over bytes in <0x..>."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=first, show_progress=False, initial_alphabet=["\u2581"], limit_alphabet=60
    )
    tokenizer.train_from_iterator(EXPECTED["texts"] * 3, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    written = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    written["added_tokens"] = written["added_tokens"][:3]  # bytes are no text that stands for itself
    (directory / "tokenizer.json").write_text(json.dumps(written), encoding="utf-8")


def test_sentencepiece_ids_are_those_of_tokenizer_json(tmp_path: Path) -> None:
    write_llama_tokenizer(tmp_path)
    metadata = sentencepiece_metadata(tmp_path)
    original = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    found = load(metadata)
    for text in EXPECTED["texts"]:
        expected = original.encode(text, add_special_tokens=False).ids
        assert found.encode(text, add_special_tokens=False).ids == expected, text
        assert found.decode(expected) == original.decode(expected)
    files = built(metadata)
    assert files is not None
    assert (files.add_bos_token, files.bos_token_id) == (True, 1)


def test_gemma_puts_no_space_in_front() -> None:
    tokens = ["<unk>", "<s>", "\u2581", "a", "b", "\u2581a", *(f"<0x{byte:02X}>" for byte in range(256))]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([0.0] * len(tokens)),
        "tokenizer.ggml.token_type": np.array([2, 3, 1, 1, 1, 1] + [6] * 256),
        "tokenizer.ggml.unknown_token_id": 0,
    }
    assert load(metadata).encode("a a").tokens == ["\u2581a", "\u2581a"]
    tokenizer = load({**metadata, "tokenizer.ggml.add_space_prefix": False})
    assert tokenizer.encode("a a").tokens == ["a", "\u2581a"]
    assert tokenizer.decode(tokenizer.encode(" a é").ids) == " a é"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "jais"}, r"pre-tokenizer 'jais' is not known \(known: codeshell"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer model 't5' is not supported"),
        ({"tokenizer.ggml.merges": None}, r"lacks tokenizer\.ggml\.merges"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "has token 'a' twice"),
        ({"tokenizer.ggml.token_type": np.array([1])}, "1 token types"),
    ],
)
def test_what_would_give_wrong_ids_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        built({**byte_level("gpt-2"), **change})


def test_a_file_without_tokenizer_has_none() -> None:
    assert built({}) is None
    assert built({"tokenizer.ggml.model": "none"}) is None
