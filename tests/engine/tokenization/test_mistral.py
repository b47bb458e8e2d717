"""tokenizer_mode mistral, beside the library itself."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dovetail.contracts.errors import ModelError, RequestError
from dovetail.contracts.weights import TokenizerFiles
from dovetail.engine.tokenization.detokenizer import create_detokenizer
from dovetail.engine.tokenization.load import load_tokenizer
from dovetail.engine.tokenization.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "hello [INST] 🙂"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tekken.json whose tokens are bytes, and "he", behind twenty control tokens."""
    path = tmp_path_factory.mktemp("tekken")
    pieces = [bytes([value]) for value in range(256)] + [b"he"]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate(pieces)
    ]
    config = {
        "pattern": r"\S+|\s+",
        "num_vocab_tokens": len(pieces),
        "default_vocab_size": len(pieces) + 20,
        "default_num_special_tokens": 20,
        "version": "v3",
    }
    tekken = {"vocab": vocabulary, "special_tokens": None, "config": config, "version": 1, "type": "Tekken"}
    (path / "tekken.json").write_text(json.dumps(tekken))
    return path


def load(directory: Path) -> Tokenizer:
    found = load_tokenizer(TokenizerFiles(directory=directory), "mistral")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def library(directory: Path) -> Any:
    mistral = pytest.importorskip("mistral_common.tokens.tokenizers.mistral")
    return mistral.MistralTokenizer.from_file(str(directory / "tekken.json"))


def test_ids_are_the_librarys(directory: Path, library: Any) -> None:
    from mistral_common.protocol.instruct.request import ChatCompletionRequest

    ours = load(directory)
    backend = library.instruct_tokenizer.tokenizer
    assert ours.encode("hello é") == backend.encode("hello é", bos=True, eos=False)
    expected = library.encode_chat_completion(ChatCompletionRequest.from_openai(CHAT))
    assert ours.apply_chat_template(CHAT, tokenize=True) == expected.tokens
    text, ids = ours.chat_prompt(CHAT)
    assert ids == expected.tokens
    assert "hello [INST] 🙂" in text
    assert ours.eos_token_id == backend.eos_id
    assert ours.decode(ids) == "hello [INST] 🙂"
    assert set(ours.all_special_ids) == set(range(20))


def test_text_comes_in_pieces(directory: Path, library: Any) -> None:
    ours = load(directory)
    ids = ours.encode("hey 🙂!", add_special_tokens=False)
    detokenizer = create_detokenizer(ours, [])
    assert "".join(detokenizer.push([token]) for token in ids) + detokenizer.finish() == "hey 🙂!"


def test_what_the_library_cannot_write_is_refused(directory: Path, library: Any) -> None:
    ours = load(directory)
    with pytest.raises(RequestError, match="without a template"):
        ours.chat_prompt(CHAT, chat_template="{{ messages }}")
    with pytest.raises(RequestError, match="mistral-common refused"):
        ours.chat_prompt([{"role": "nobody", "content": "a"}])


def test_what_is_missing_is_said(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"tekken\.json or tokenizer\.model"):
        load(tmp_path)
    monkeypatch.setitem(sys.modules, "mistral_common.tokens.tokenizers.mistral", None)
    with pytest.raises(ModelError, match=r"pip install 'dovetail\[mistral\]'"):
        load(directory)
