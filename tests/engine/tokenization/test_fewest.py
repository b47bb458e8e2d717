"""The lower bound of a text's tokens: it never says more than there are, and refuses what is far too long."""

from __future__ import annotations

import json
import sys
import unicodedata
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dovetail.engine.tokenization.fewest import NFC_SHRINKS, FewestTokens, fewest_tokens
from tests.engine.tokenization.conftest import JSONS


def changed(name: str, **parts: Any) -> str:
    return json.dumps({**json.loads(JSONS[name]()), **parts})


BOUND = {
    "byte_level": JSONS["byte_level"](),
    "sentencepiece": JSONS["sentencepiece"](),
    "nfc": changed("byte_level", normalizer={"type": "NFC"}),
}
PIECES = [*"the in12ld é\u0301\u0345\u0300α\u212a\u1100\u1161\u11a8\n😀", "<|im_start|>", "<s>"]
TEXTS = st.lists(st.sampled_from(PIECES) | st.characters(exclude_categories=["Cs"])).map("".join)
BACKENDS = {name: Tokenizer.from_str(source) for name, source in BOUND.items()}
FEWEST = {name: fewest_tokens(source) for name, source in BOUND.items()}


@pytest.mark.parametrize("name", BOUND)
@given(text=TEXTS)
@example(text="\u212a" * 100)
@example(text="\u1100\u1161\u11a8" * 100)
@example(text="α\u0313\u0300\u0345" * 100)
@example(text="<|im_start|>" * 50)
def test_no_text_has_fewer_tokens(name: str, text: str) -> None:
    found = FEWEST[name]
    assert found is not None
    assert found.of(text) <= len(BACKENDS[name].encode(text, add_special_tokens=False).ids)


@given(text=TEXTS, longest=st.integers(1, 20))
def test_the_bound_counts_bytes(text: str, longest: int) -> None:
    assert FewestTokens(longest, is_composed=False).of(text) == len(text.encode()) // longest


def test_characters_are_composed_to_no_less_than_the_bound_says() -> None:
    """Every character there is: decomposed it is at least a third, and what it is composed of at most thrice."""
    for code in range(sys.maxunicode + 1):
        if 0xD800 <= code < 0xE000:
            continue
        size, decomposed = len(chr(code).encode()), len(unicodedata.normalize("NFD", chr(code)).encode())
        assert size <= 3 * decomposed <= NFC_SHRINKS * size or chr(code) not in unicodedata.normalize("NFC", chr(code))


@pytest.mark.parametrize(
    "source",
    [
        JSONS["metaspace"](),
        changed("byte_level", normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
        changed("byte_level", normalizer={"type": "Replace", "pattern": {"String": "ab"}, "content": "a"}),
        changed("byte_level", normalizer={"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}),
        changed("byte_level", pre_tokenizer={"type": "Whitespace"}),
        changed("byte_level", pre_tokenizer=None),
    ],
    ids=["unknown characters", "strips", "shortens", "joins spaces", "drops spaces", "no bytes"],
)
def test_a_tokenizer_that_may_lose_text_has_no_bound(source: str) -> None:
    assert fewest_tokens(source) is None
