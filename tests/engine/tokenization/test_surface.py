"""What programs call on a tokenizer, beside what Hugging Face's of the same files answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from dovetail.contracts.errors import RequestError
from dovetail.contracts.weights import TokenizerFiles
from dovetail.engine.tokenization.load import load_tokenizer
from dovetail.engine.tokenization.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}{{ mood }}<|im_end|>{% endfor %}"
CHAT = [{"role": "user", "content": "hello world"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, tokenizer_jsons: dict[str, str]) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    (path / "tokenizer.json").write_text(tokenizer_jsons["byte_level"])
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, **special}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def ours(directory: Path) -> Tokenizer:
    found = load_tokenizer(TokenizerFiles(directory=directory), "auto")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def theirs(directory: Path) -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast.from_pretrained(directory)


def test_attributes(ours: Tokenizer, theirs: transformers.PreTrainedTokenizerFast) -> None:
    for name in ("bos_token", "eos_token", "pad_token", "bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.chat_template == theirs.chat_template
    assert ours.all_special_ids == sorted(theirs.all_special_ids)
    assert set(ours.all_special_tokens) == set(theirs.all_special_tokens)
    assert len(ours) == len(theirs)
    assert (ours.unk_token, ours.unk_token_id) == (None, None)


def test_calls(ours: Tokenizer, theirs: transformers.PreTrainedTokenizerFast) -> None:
    for text in ("hello world", ["hello", "in the"]):
        expected = theirs(text)
        assert ours(text) == {name: expected[name] for name in ("input_ids", "attention_mask")}
    ids = theirs(["hello<|im_end|>", "in the"])["input_ids"]
    for skips in (False, True):
        assert ours.batch_decode(ids, skip_special_tokens=skips) == theirs.batch_decode(ids, skip_special_tokens=skips)
    assert ours.convert_ids_to_tokens(ids[0]) == theirs.convert_ids_to_tokens(ids[0])
    assert ours.convert_ids_to_tokens(3) == theirs.convert_ids_to_tokens(3)
    tokens = theirs.convert_ids_to_tokens(ids[0])
    assert ours.convert_tokens_to_ids(tokens) == ids[0]
    assert ours.convert_tokens_to_ids("no such token") is None


def test_a_chat_as_token_ids(ours: Tokenizer, theirs: transformers.PreTrainedTokenizerFast) -> None:
    text = theirs.apply_chat_template(CHAT, tokenize=False, mood="!")
    assert ours.apply_chat_template(CHAT, mood="!") == text
    assert ours.apply_chat_template(CHAT, tokenize=False, mood="!") == text
    ids = theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.apply_chat_template(CHAT, tokenize=True, return_dict=False, mood="!") == ids


def test_words_that_nobody_reads_are_refused(ours: Tokenizer) -> None:
    with pytest.raises(RequestError, match="reads no variable 'mod'"):
        ours.apply_chat_template(CHAT, mod="!")
    with pytest.raises(RequestError, match=r"return_tensors='pt'.*plain list of token ids"):
        ours.apply_chat_template(CHAT, tokenize=True, return_tensors="pt")
