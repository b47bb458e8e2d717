"""Regular expressions as the contract has them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.contracts.errors import RequestError
from dovetail.plugins.grammars.patterns import read_pattern, repeats_in_rules

ATOMS = ("a", "b", ".", r"\d", r"\w", r"\s", "[a-c]", "[^a]", r"[\d-]", r"\.", r"\x41", r"\u00e9", r"\n", r"\/", "é")


def patterns() -> st.SearchStrategy[str]:
    atom = st.sampled_from(ATOMS)
    return st.recursive(
        atom,
        lambda inner: st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map("|".join),
            st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,}", "{0,2}"])).map(
                lambda pair: f"({pair[0]}){pair[1]}"
            ),
        ),
        max_leaves=6,
    )


@given(patterns(), st.text("ab1é. \n-/A", max_size=5), st.booleans())
def test_what_is_read_matches_what_the_source_matches(source: str, text: str, is_anchored: bool) -> None:
    found = read_pattern(f"^{source}$" if is_anchored and "|" not in source else source)
    assert bool(re.fullmatch(found.text, text)) == bool(re.fullmatch(source, text, re.ASCII))


@given(st.text(r"ab(|)[]^$*+?{},1\d-.:=!<", max_size=12))
def test_whatever_is_written_is_read_or_refused(source: str) -> None:
    try:
        found = read_pattern(source)
    except RequestError:
        return
    re.compile(found.text)


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("ab(?=c)", "character 3"),
        ("a$b", "character 2"),
        (r"x\1", "character 2"),
        ("a*?", "character 3"),
        ("x[a", "character 2"),
        ("(((", "character 3"),
        ("a{5,2}", "character 2"),
        ("a{20000}", "character 2"),
        (r"\ud800", "character 1"),
    ],
)
def test_refusals_say_where(source: str, place: str) -> None:
    with pytest.raises(RequestError, match=place):
        read_pattern(source)


def test_bounds_are_multiplied() -> None:
    assert read_pattern("((a{3}){5}|b{2,7})*").repeats == 3 * 5 * 7


def test_bounds_of_rules_are_multiplied() -> None:
    assert repeats_in_rules('root ::= a{3} b{2,5}\na ::= "x"{,7}\nb: c~4..6 d~2 {1,}') == 3 * 5 * 7 * 6 * 2
    assert repeats_in_rules('start: "a" /[0-9]/') == 1
