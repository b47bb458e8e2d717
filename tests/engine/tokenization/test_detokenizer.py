"""Incremental detokenization: the pieces make up the whole, and no piece ends inside a character."""

import codecs
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from dovetail.engine.tokenization.detokenizer import create_detokenizer
from dovetail.engine.tokenization.tokenizer import Tokenizer


def pieces(
    tokenizer: Tokenizer, ids: Sequence[int], sizes: Sequence[int] = (), prompt: Sequence[int] = (), skip: bool = True
) -> list[str]:
    """What each push and the end give, the ids handed over in groups of `sizes` (then one by one)."""
    detokenizer = create_detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    found, rest = [], list(ids)
    for size in (*sizes, *[1] * len(rest)):
        found.append(detokenizer.push(rest[:size]))
        del rest[:size]
    found.append(detokenizer.finish())
    return found


ids_of_byte_level = st.lists(st.integers(0, 266), max_size=40)
ids_of_sentencepiece = st.lists(st.integers(0, 292), max_size=40)
groups = st.lists(st.integers(1, 5), max_size=8)


@settings(max_examples=200, deadline=None)
@given(ids=ids_of_byte_level, sizes=groups, skip=st.booleans())
def test_byte_level_pieces_make_what_the_library_decodes(
    ids: list[int], sizes: list[int], skip: bool, byte_level: Tokenizer, tokenizer_jsons: dict[str, str]
) -> None:
    whole = Backend.from_str(tokenizer_jsons["byte_level"]).decode(ids, skip_special_tokens=skip)
    assert "".join(pieces(byte_level, ids, sizes, skip=skip)) == whole
    assert byte_level.decode(ids, skip_special_tokens=skip) == whole


def raw_bytes(backend: Backend, ids: Sequence[int]) -> bytes:
    """What SentencePiece's tokens stand for, the long way."""
    found = b""
    for token in ids:
        text = backend.id_to_token(token) or ""
        found += bytes([int(text[3:5], 16)]) if text.startswith("<0x") else text.replace("\u2581", " ").encode()
    return found


@settings(max_examples=200, deadline=None)
@given(ids=ids_of_sentencepiece, sizes=groups)
def test_sentencepiece_pieces_make_the_utf8_of_the_tokens(
    ids: list[int], sizes: list[int], sentencepiece: Tokenizer, tokenizer_jsons: dict[str, str]
) -> None:
    backend = Backend.from_str(tokenizer_jsons["sentencepiece"])
    data = raw_bytes(backend, ids)
    whole = data.decode(errors="replace").removeprefix(" ")
    assert "".join(pieces(sentencepiece, ids, sizes, skip=False)) == whole
    assert sentencepiece.decode(ids, skip_special_tokens=False) == whole
    if "\ufffd" not in whole:
        # The library replaces every byte of a run that is invalid somewhere; elsewhere both must agree.
        assert backend.decode(ids, skip_special_tokens=False) == whole


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30), sizes=groups)
def test_text_comes_back_and_never_half_a_character(
    text: str, sizes: list[int], byte_level: Tokenizer, sentencepiece: Tokenizer
) -> None:
    for tokenizer in (byte_level, sentencepiece):
        ids = tokenizer.encode(text, add_special_tokens=False)
        found = pieces(tokenizer, ids, sizes, skip=False)
        assert "".join(found) == tokenizer.decode(ids, skip_special_tokens=False)
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in found)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 15), max_size=40), sizes=groups)
def test_other_decoders_go_by_the_library(
    ids: list[int], sizes: list[int], metaspace: Tokenizer, tokenizer_jsons: dict[str, str]
) -> None:
    whole = Backend.from_str(tokenizer_jsons["metaspace"]).decode(ids, skip_special_tokens=True)
    assert "".join(pieces(metaspace, ids, sizes)) == metaspace.decode(ids) == whole


def test_a_character_waits_for_its_last_byte(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a😀b")
    assert len(ids) == 6
    assert pieces(byte_level, ids) == ["a", "", "", "", "😀", "b", ""]


def test_a_character_that_is_never_completed_comes_at_the_end(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a😀")[:-1]
    assert pieces(byte_level, ids) == ["a", "", "", "", "\ufffd"]


def test_the_first_word_keeps_its_space_behind_a_prompt(sentencepiece: Tokenizer) -> None:
    prompt = sentencepiece.encode("in")
    ids = sentencepiece.encode("the in", add_special_tokens=False)
    assert "".join(pieces(sentencepiece, ids, prompt=prompt)) == " the in"
    assert "".join(pieces(sentencepiece, ids, prompt=prompt[:1])) == "the in"
    assert "".join(pieces(sentencepiece, ids)) == "the in"


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_a_character_that_the_prompt_began_is_finished(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode("the 日本", add_special_tokens=False)
    for cut in range(1, len(ids)):
        before = codecs.utf_8_decode(tokenizer.decode(ids[:cut]).encode(), "ignore")[0].rstrip("\ufffd")
        after = "".join(pieces(tokenizer, ids[cut:], prompt=ids[:cut]))
        assert before + after == "the 日本"


def test_special_tokens_are_left_out_or_shown(byte_level: Tokenizer) -> None:
    ids = [0, *byte_level.encode("the"), 2, 1]
    assert "".join(pieces(byte_level, ids)) == "the<think>"
    assert "".join(pieces(byte_level, ids, skip=False)) == "<|im_start|>the<think><|im_end|>"


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "metaspace"])
def test_kept_special_tokens_are_shown_and_others_are_not(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    special = sorted(tokenizer.special_token_ids)
    text = tokenizer.encode("ab", add_special_tokens=False)
    ids = [*special, *text, *special]
    kept, dropped = special[:1], [token for token in ids if token not in special[1:]]
    shown = create_detokenizer(tokenizer, text, kept_special_tokens=kept)
    expected = create_detokenizer(tokenizer, text, skip_special_tokens=False)
    pushed = "".join(shown.push([token]) for token in ids) + shown.finish()
    assert pushed == expected.push(dropped) + expected.finish()
    assert tokenizer.id_to_token(special[0]) in pushed  # type: ignore[operator]
