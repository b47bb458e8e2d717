from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.speculation import DraftBatch, DraftRequest
from dovetail.spec_decode.ngram import NgramDrafter, NgramOptions
from dovetail.testing.draft_suite import DraftWorkerSuite


class TestNgramDrafter(DraftWorkerSuite):
    plugin = NgramDrafter


def guess(tokens: list[int], count: int, options: NgramOptions) -> list[int]:
    suite = TestNgramDrafter()
    worker = NgramDrafter(options, suite.create().setup)
    known = np.array(tokens, dtype=np.int32)
    request = DraftRequest(0, known, 1, count, SamplingParams(), np.array([0]), np.zeros(count))
    draft = worker.propose(DraftBatch([request], None))[0]
    return [] if draft is None else list(draft.token_ids)


def brute_force(tokens: list[int], count: int, options: NgramOptions) -> list[int]:
    """Tries every length from the longest down, and every place."""
    for length in range(min(options.max_match, len(tokens) - 1), options.min_match - 1, -1):
        suffix = tokens[-length:]
        ends = [end for end in range(length, len(tokens)) if tokens[end - length : end] == suffix]
        if ends:
            start = ends[-1] if options.occurrence == "latest" else ends[0]
            text = list(tokens)
            for i in range(count):
                text.append(text[start + i])
            return text[len(tokens) :]
    return []


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    count=st.integers(0, 6),
    matches=st.tuples(st.integers(1, 6), st.integers(1, 6)).map(sorted),
    occurrence=st.sampled_from(["latest", "earliest"]),
)
@settings(max_examples=300, deadline=None)
def test_guess_follows_the_longest_match(tokens: list[int], count: int, matches: list[int], occurrence: str) -> None:
    options = NgramOptions.model_validate({"min_match": matches[0], "max_match": matches[1], "occurrence": occurrence})
    assert guess(tokens, count, options) == brute_force(tokens, count, options)


def test_a_loop_is_continued_past_its_end() -> None:
    assert guess([1, 2, 3, 1, 2, 3, 1, 2], 5, NgramOptions()) == [3, 1, 2, 3, 1]


def test_crossed_lengths_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"min_match \(4\) must not exceed max_match \(3\)"):
        NgramOptions(min_match=4, max_match=3)
