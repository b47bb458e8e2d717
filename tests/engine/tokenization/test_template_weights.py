"""Weights of values, against counting every part of a copy in which nothing is shared."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.engine.tokenization.template_weights import TemplateLimitError, Weights

LEAVES = st.none() | st.booleans() | st.integers(0, 100) | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    LEAVES,
    lambda part: (
        st.lists(part, max_size=4)
        | st.lists(part, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3), part, max_size=4)
    ),
)


def weights(most: int = 10**9) -> Weights:
    return Weights(most, lambda size: None)


def counted(value: Any) -> int:
    """Texts count their characters, containers their items, and all that stands in them."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return len(value) + sum(map(counted, value.keys())) + sum(map(counted, value.values()))
    return len(value) + sum(map(counted, value)) if isinstance(value, list | tuple) else 0


@given(VALUES)
def test_a_weight_is_that_of_all_parts(value: Any) -> None:
    assert weights().of(value).size == counted(value)


@given(VALUES)
def test_what_stands_twice_weighs_twice(value: Any) -> None:
    assert weights().of([value, {"again": value}]).size == counted([value, {"again": json.loads(json.dumps(value))}])


def test_the_views_of_a_mapping_weigh_what_they_show() -> None:
    data = {"key": ["abc"], "k": 1}
    weigh = weights()
    assert [weigh.of(view).size for view in (data.keys(), data.values(), data.items())] == [2 + 4, 2 + 4, 2 + 8]


def test_sixty_doublings_are_refused_after_as_many_lists() -> None:
    value: list[Any] = [1]
    for _ in range(60):
        value = [value, value]
    num_steps = 0

    def count(size: int) -> None:
        nonlocal num_steps
        num_steps += 1 + size

    with pytest.raises(TemplateLimitError, match="more text than any chat needs"):
        Weights(2**22, count).of(value)
    assert num_steps < 200


def test_a_list_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TemplateLimitError, match="deeper than any chat needs"):
        weights().of(value)


def test_forgotten_weights_are_counted_anew() -> None:
    weigh = weights()
    shared = ["abc"]
    for number in range(2**17):
        assert weigh.of([shared, str(number)]).size == 2 + 4 + len(str(number))
