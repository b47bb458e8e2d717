from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.spec_decode.suffix import store as module
from dovetail.spec_decode.suffix.store import AnswerStore


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def contexts(store: AnswerStore, pair: list[int]) -> list[list[int]]:
    """The three tokens around each place that the store names: the pair, and the token after it."""
    return sorted(store.text[end - 2 : end + 1].tolist() for end in store.ends(array(pair)))


@given(
    answers=st.lists(st.lists(st.integers(0, 3), min_size=0, max_size=30), max_size=20),
    pair=st.lists(st.integers(0, 3), min_size=2, max_size=2),
    max_tail=st.sampled_from([0, 10, 10_000]),
)
@settings(max_examples=200, deadline=None)
def test_every_occurrence_of_a_pair_is_found(answers: list[list[int]], pair: list[int], max_tail: int) -> None:
    store = AnswerStore(100_000, 3, 2)
    before, module._MAX_TAIL = module._MAX_TAIL, max_tail
    try:
        for answer in answers:
            store.add(array(answer))
    finally:
        module._MAX_TAIL = before
    expected = [
        [*pair, *answer[i + 2 : i + 3]] if i + 2 < len(answer) else [*pair, -1]
        for answer in answers
        for i in range(len(answer) - 1)
        if answer[i : i + 2] == pair
    ]
    found = contexts(store, pair)
    assert len(found) == min(len(expected), module.MAX_MATCHES)
    assert len(found) < len(expected) or found == sorted(expected)


@given(sizes=st.lists(st.integers(2, 40), max_size=60))
@settings(max_examples=60, deadline=None)
def test_memory_is_bounded(sizes: list[int]) -> None:
    store = AnswerStore(100, 3, 2)
    for i, size in enumerate(sizes):
        store.add(array(list(range(i, i + size))))
        assert len(store) <= 100
        assert len(store.text) <= 500


def test_the_least_recently_used_answers_give_way() -> None:
    store = AnswerStore(90, 3, 2)
    for i in range(4):
        store.add(array(list(range(100 * i, 100 * i + 20))))
    store.touch(int(store.ends(array([5, 6]))[-1]))
    store.add(array(list(range(900, 920))))
    assert len(store.ends(array([5, 6]))) == 1
    assert len(store.ends(array([105, 106]))) == 0
    assert len(store.ends(array([905, 906]))) == 1


def test_an_answer_longer_than_the_store_keeps_its_end() -> None:
    store = AnswerStore(10, 3, 2)
    store.add(array(list(range(50))))
    assert len(store) == 10
    assert len(store.ends(array([47, 48]))) == 1
    assert len(store.ends(array([7, 8]))) == 0


def test_an_empty_store_finds_nothing() -> None:
    assert len(AnswerStore(0, 3, 2).ends(array([1, 2]))) == 0
