"""The parts that dialects are made of."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.plugins.dialects.json_text import JSONReader, raw_items
from dovetail.plugins.dialects.lark import text_without
from dovetail.plugins.dialects.shapes import SPACE, Shape, alt, json_string, lit, opt, seq

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
plainly = settings(max_examples=100, deadline=None, database=None, derandomize=True)


@plainly
@given(
    value=st.dictionaries(st.text(max_size=4), json_values, max_size=3), rest=st.text(max_size=6), indent=st.booleans()
)
def test_a_json_value_ends_where_it_ends(value, rest, indent):
    text = json.dumps(value, indent=1 if indent else None)
    reader = JSONReader()
    piece, end = reader.read(text + rest)
    assert (piece, end, reader.is_done) == (text, len(text), True)


@plainly
@given(text=st.text(alphabet='{}[]",:\\ntrue0-1.e \n', max_size=30))
def test_what_is_read_whole_is_json(text):
    reader = JSONReader()
    piece, _ = reader.read("{" + text)
    if reader.is_done:
        assert isinstance(json.loads(piece), dict)
    elif not reader.is_broken:
        with pytest.raises(json.JSONDecodeError):
            json.loads(piece)


@pytest.mark.parametrize(
    "text", ['{"a" 1}', "{a: 1}", "{'a': 1}", '{"a": 01}', '{"a": 1,}', "[1 2]", '{"a": tru}', '{"\\x": 1}']
)
def test_what_is_no_json_breaks_off(text):
    reader = JSONReader()
    reader.read(text)
    assert reader.is_broken


ESCAPES = st.sampled_from(["\\ud83e", "\\uDD8A", "\\n", "\\\\", "\\u00e9", "\\u", "ud83e", "x"])


@plainly
@given(inside=st.lists(ESCAPES, max_size=5).map("".join), cut=st.integers(0, 40))
def test_halves_of_characters_are_replaced_however_they_come(inside, cut):
    text = f'{{"a": "{inside}"}}'
    whole, pieces = JSONReader(), JSONReader()
    first, _ = whole.read(text)
    begin, at = pieces.read(text[:cut])
    rest, _ = pieces.read(text[at:])
    assert (begin + rest, pieces.is_done, pieces.is_broken) == (first, whole.is_done, whole.is_broken)
    if whole.is_done:
        expected = json.loads(text)["a"].encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        assert json.loads(first)["a"] == expected


def test_nesting_has_an_end():
    reader = JSONReader()
    reader.read("[" * 10_000)
    assert reader.is_broken


def test_items_are_spelled_as_they_were():
    assert dict(raw_items(' {"a": 1.50, "b" : {"c": [ ]},"d":"\\u00e9"} ')) == {
        "a": "1.50",
        "b": '{"c": [ ]}',
        "d": '"\\u00e9"',
    }
    with pytest.raises(ValueError, match="must be a JSON object"):
        list(raw_items("[1]"))


@plainly
@given(text=st.text(alphabet="<>/ab\n", max_size=14))
def test_text_without_markers_has_none(text):
    markers = ["<a>", "</a>", "<ab>"]
    is_without = re.fullmatch(text_without(markers), text) is not None
    assert is_without == (not any(marker in text for marker in markers))


@plainly
@given(text=st.text(alphabet='{}" nx\n', max_size=12))
def test_nor_with_space_in_them(text):
    is_without = re.fullmatch(text_without(['{"n"'], spaced=True), text) is not None
    assert is_without == (re.search(r'\{\s*"n"', text) is None)


def test_markers_that_no_regular_expression_here_leaves_out_are_refused():
    with pytest.raises(ValueError, match="begin with one character"):
        text_without(["<a>", "[b]"])


SHAPE = Shape(seq(lit("<c>"), SPACE, opt(lit("x")), alt(lit("[["), json_string("name"))))


@plainly
@given(text=st.text(alphabet='<c> x["\\', max_size=14))
def test_a_shape_holds_what_may_become_a_match_and_nothing_else(text):
    held = SHAPE.held(text)
    endings = ["", "<c>[[", "c>[[", ">[[", "[[", "[", '"', '""', 'x"', '\\"', '"\\""']
    for at in range(len(text)):
        begins = any(
            (match := SHAPE.match(text[at:] + ending)) is not None and match.end() > len(text) - at
            for ending in endings
        )
        if begins:
            assert held <= at, (text, at)
    if held < len(text):
        assert SHAPE.may_begin(text[held:])
    if not SHAPE.may_be_in(text):
        assert (SHAPE.find(text), held) == (None, len(text))
