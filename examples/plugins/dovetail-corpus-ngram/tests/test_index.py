"""The index against looking at every place."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from dovetail_corpus_ngram.index import END, SAMPLED, CorpusIndex
from hypothesis import given, settings
from hypothesis import strategies as st

DEPTH = 5
DOCUMENTS = st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=6)


def index_of(documents: list[list[int]]) -> CorpusIndex:
    return CorpusIndex([np.array(document, dtype=np.int32) for document in documents], DEPTH)


def followers(documents: list[list[int]], tokens: list[int]) -> Counter[int]:
    """What follows `tokens`, and how often: END behind a document."""
    size = len(tokens)
    return Counter(
        (*document, END)[start + size]
        for document in documents
        for start in range(len(document) - size + 1)
        if document[start : start + size] == tokens
    )


@settings(max_examples=300, deadline=None)
@given(documents=DOCUMENTS, tokens=st.lists(st.integers(0, 3), min_size=1, max_size=DEPTH - 1))
def test_places_and_likeliest_tokens_are_those_of_brute_force(documents: list[list[int]], tokens: list[int]) -> None:
    index, expected = index_of(documents), followers(documents, tokens)
    places = index.find(tokens)
    assert len(places) == expected.total()
    if not places:
        return
    tokens_that_follow = {token: count for token, count in expected.items() if token != END}
    if not tokens_that_follow:
        assert index.likeliest(places) == END
        return
    assert expected[index.likeliest(places)] == max(tokens_that_follow.values())
    for token, count in tokens_that_follow.items():
        assert len(index.narrowed(places, token)) == count


def test_nothing_is_known_behind_the_depth() -> None:
    index = index_of([[0, 1, 2, 3, 0, 1, 2, 3, 0]])
    places = index.find([0, 1, 2, 3, 0])
    assert len(places) == 2
    assert index.likeliest(places) == END
    assert len(index.narrowed(places, 1)) == 0


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_of_many_places_a_sample_finds_what_is_frequent(share: float) -> None:
    """Three quarters of what follows 7 is spread over tokens of a few places each."""
    generator = np.random.default_rng(0)
    size = 20 * SAMPLED
    rare = generator.integers(10, 10 + size // 4, size)
    behind = np.where(generator.random(size) < share, 9, rare)
    text = np.stack((np.full(size, 7), behind), axis=1).reshape(-1).astype(np.int32)
    index = CorpusIndex([text], DEPTH)
    places = index.find([7])
    assert len(places) == size
    assert index.likeliest(places) == 9


def test_an_empty_corpus_has_no_places() -> None:
    assert not index_of([]).find([1])
    assert not index_of([[], []]).find([1])
