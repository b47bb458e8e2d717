"""Small tokenizers of the two kinds that matter, and one of another kind."""

import json
from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from dovetail.contracts.weights import TokenizerFiles
from dovetail.engine.tokenization.load import load_tokenizer
from dovetail.engine.tokenization.tokenizer import Tokenizer

WORDS = ["he", "llo", "wor", "ld", "in", "the", "12"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _added(tokens: list[str], specials: int) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [{"id": index, "content": token, "special": index < specials, **flags} for index, token in enumerate(tokens)]


def _tokenizer_json(**parts: Any) -> str:
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return json.dumps({"version": "1.0", "added_tokens": [], **empty, **parts})


def byte_level_json() -> str:
    """Every byte, a few words, two special tokens and one that is only added."""
    added = ["<|im_start|>", "<|im_end|>", "<think>"]
    vocabulary = [*added, *sorted(ByteLevel.alphabet()), *WORDS, "Ġthe"]
    return _tokenizer_json(
        added_tokens=_added(added, specials=2),
        pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        model={
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(vocabulary)},
            "merges": [["h", "e"], ["i", "n"], ["1", "2"], ["l", "d"], ["t", "he"], ["Ġ", "the"]],
        },
    )


def sentencepiece_json() -> str:
    """Every byte as a fallback, letters, a few words, and spaces written as U+2581."""
    added = ["<unk>", "<s>", "</s>"]
    letters = [*"abcdefghijklmnopqrstuvwxyz.,é", "\u2581"]
    words = ["he", "in", "the", "\u2581the"]
    vocabulary = [*added, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words]
    return _tokenizer_json(
        added_tokens=_added(added, specials=3),
        normalizer={
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            ],
        },
        decoder={
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        model={
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {token: index for index, token in enumerate(vocabulary)},
            "merges": [["h", "e"], ["i", "n"], ["t", "he"], ["\u2581", "the"]],
        },
    )


def metaspace_json() -> str:
    """A decoder whose first token differs from the others: nothing that a table of bytes can tell."""
    vocabulary = ["<unk>", "\u2581", *"abcdefghij", "\u2581a", "\u2581b", "é", "😀"]
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    return _tokenizer_json(
        added_tokens=_added(["<unk>"], specials=1),
        pre_tokenizer=metaspace,
        decoder=metaspace,
        model={
            "type": "BPE",
            "unk_token": "<unk>",
            "vocab": {token: index for index, token in enumerate(vocabulary)},
            "merges": [["\u2581", "a"], ["\u2581", "b"]],
        },
    )


JSONS = {"byte_level": byte_level_json, "sentencepiece": sentencepiece_json, "metaspace": metaspace_json}


@pytest.fixture(scope="session")
def tokenizer_jsons() -> dict[str, str]:
    return {name: create() for name, create in JSONS.items()}


def _load(source: str, **values: Any) -> Tokenizer:
    tokenizer = load_tokenizer(TokenizerFiles(tokenizer_json=source, **values), "auto")
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="session")
def byte_level(tokenizer_jsons: dict[str, str]) -> Tokenizer:
    return _load(tokenizer_jsons["byte_level"], bos_token_id=0, eos_token_id=1, chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def sentencepiece(tokenizer_jsons: dict[str, str]) -> Tokenizer:
    return _load(tokenizer_jsons["sentencepiece"], bos_token_id=1, eos_token_id=2, add_bos_token=True)


@pytest.fixture(scope="session")
def metaspace(tokenizer_jsons: dict[str, str]) -> Tokenizer:
    return _load(tokenizer_jsons["metaspace"])
