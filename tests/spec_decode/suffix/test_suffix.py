from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.speculation import DraftBatch, DraftRequest
from dovetail.spec_decode.matching import MAX_COUNTED, grow, match_lengths, padded
from dovetail.spec_decode.suffix.drafter import SuffixDrafter, SuffixOptions
from dovetail.testing.draft_suite import DraftWorkerSuite


class TestSuffixDrafter(DraftWorkerSuite):
    plugin = SuffixDrafter


class TestSuffixTrees(DraftWorkerSuite):
    plugin = SuffixDrafter
    options = {"tree": True, "min_match": 1, "max_spec_factor": 4.0}  # noqa: RUF012


def create(**options: object) -> SuffixDrafter:
    return SuffixDrafter(SuffixOptions.model_validate(options), TestSuffixDrafter().create().setup)


def request(tokens: Sequence[int], count: int, seq_id: int = 0, num_prompt_tokens: int = 1) -> DraftRequest:
    known = np.array(tokens, dtype=np.int32)
    return DraftRequest(seq_id, known, num_prompt_tokens, count, SamplingParams(), np.array([0]), np.zeros(count))


def guess(worker: SuffixDrafter, tokens: Sequence[int], count: int) -> list[int]:
    draft = worker.propose(DraftBatch([request(tokens, count)], None))[0]
    return [] if draft is None else list(draft.token_ids)


def continuations(tokens: list[int], length: int) -> list[list[int]]:
    """What follows each of the latest earlier occurrences of the last `length` tokens, oldest first."""
    suffix = tokens[-length:]
    ends = [end for end in range(length, len(tokens)) if tokens[end - length : end] == suffix]
    return [tokens[end:] for end in ends[-MAX_COUNTED:]]


def frequent_chain(texts: list[list[int]], count: int, min_prob: float) -> tuple[list[int], float]:
    """One token after the other: the one that followed most often, of equally frequent ones the latest."""
    chain: list[int] = []
    score, prob = 0.0, 1.0
    while len(chain) < count:
        here = [text for text in texts if text[: len(chain)] == chain]
        following = [text[len(chain)] for text in here if len(text) > len(chain)]
        if not following:
            break
        counts = Counter(reversed(following))
        token, number = max(counts.items(), key=lambda item: item[1])
        prob = prob * number / len(here)
        if prob < min_prob:
            break
        chain.append(token)
        score += prob
    return chain, score


def brute_force(tokens: list[int], count: int, options: SuffixOptions) -> list[int]:
    best: tuple[list[int], float] = ([], 0.0)
    for length in range(min(options.max_match, len(tokens) - 1), options.min_match - 1, -1):
        texts = continuations(tokens, length)
        budget = min(count, int(options.max_spec_factor * length))
        if texts:
            found = frequent_chain(texts, budget, options.min_token_prob)
            if found[1] > best[1]:
                best = found
    return best[0]


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    count=st.integers(1, 8),
    matches=st.tuples(st.integers(1, 6), st.integers(1, 6)).map(sorted),
    factor=st.sampled_from([0.5, 1.0, 2.0]),
    min_prob=st.sampled_from([0.0, 0.3, 0.6]),
)
@settings(max_examples=400, deadline=None)
def test_guess_is_the_best_over_all_match_lengths(
    tokens: list[int], count: int, matches: list[int], factor: float, min_prob: float
) -> None:
    options = {"min_match": matches[0], "max_match": matches[1], "max_spec_factor": factor, "min_token_prob": min_prob}
    worker = create(**options)
    assert guess(worker, tokens, count) == brute_force(tokens, count, worker.options)


@given(tokens=st.lists(st.integers(0, 2), min_size=2, max_size=60), width=st.integers(1, 8))
@settings(max_examples=200, deadline=None)
def test_match_lengths(tokens: list[int], width: int) -> None:
    known = np.array(tokens, dtype=np.int32)
    suffix = known[-width:]
    ends = np.arange(1, len(tokens))
    found = match_lengths(padded(known, len(suffix), 0), ends + len(suffix), suffix)
    for end, length in zip(ends.tolist(), found.tolist(), strict=True):
        agrees = [tokens[max(0, end - n) : end] == tokens[-n:] for n in range(1, len(suffix) + 1)]
        assert length == (agrees.index(False) if False in agrees else len(suffix))


@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=1, max_size=12),
    count=st.integers(1, 12),
)
@settings(max_examples=200, deadline=None)
def test_trees_hold_the_most_likely_prefixes(rows: list[list[int]], count: int) -> None:
    tokens, parents, probs = grow(rows, count, 0.0)
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    prefixes = Counter(tuple(row[:depth]) for row in rows for depth in range(1, 5))
    best = sorted(prefixes.values(), reverse=True)[:count]
    assert [prefixes[path] for path in paths] == best
    assert len(set(paths)) == len(paths)
    assert probs == pytest.approx([number / len(rows) for number in best])


def test_confidence_is_the_share_of_places_that_went_on_so() -> None:
    # After 1 2 came 3 three times of four, and after that 4 twice of three, then 5 always.
    text = [1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 6, 7, 0, 1, 2, 8, 9, 7, 0, 1, 2]
    (draft,) = create(max_spec_factor=2.0, max_match=2).propose(DraftBatch([request(text, 3)], None))
    assert draft is not None
    assert list(draft.token_ids) == [3, 4, 5]
    assert draft.confidence == pytest.approx([3 / 4, 2 / 3, 1])


def test_longer_matches_give_longer_guesses() -> None:
    text = list(range(10, 40))
    assert guess(create(), [*text, 10, 11], 8) == [12, 13]
    assert guess(create(), [*text, 10, 11, 12, 13, 14], 8) == [15, 16, 17, 18, 19]
    assert guess(create(max_spec_factor=3.0), [*text, 10, 11], 8) == [12, 13, 14, 15, 16, 17]


def test_the_frequent_continuation_wins_over_the_latest() -> None:
    assert guess(create(), [1, 2, 7, 1, 2, 7, 1, 2, 8, 1, 2], 1) == [7]


def test_answers_of_finished_requests_are_found_and_prompts_are_not() -> None:
    worker = create()
    worker.propose(DraftBatch([request([40, 41, 42, 1, 2, 3, 4, 5], 2, seq_id=7, num_prompt_tokens=3)], None))
    worker.on_finished(7, [40, 41, 42, 1, 2, 3, 4, 5])
    assert guess(worker, [9, 1, 2], 2) == [3, 4]
    assert guess(worker, [9, 40, 41], 2) == []


def test_without_a_cache_requests_do_not_see_each_other() -> None:
    worker = create(max_cached_tokens=0)
    worker.propose(DraftBatch([request([1, 2, 3, 4], 2, seq_id=7)], None))
    worker.on_finished(7, [1, 2, 3, 4])
    assert guess(worker, [9, 2, 3], 2) == []


def test_a_tree_holds_both_continuations() -> None:
    worker = create(tree=True, max_spec_factor=2.0)
    draft = worker.propose(DraftBatch([request([1, 2, 7, 5, 1, 2, 8, 6, 1, 2], 4)], None))[0]
    assert draft is not None
    assert draft.parents is not None
    assert {(parent, token) for parent, token in zip(draft.parents, draft.token_ids, strict=True)} >= {(-1, 7), (-1, 8)}
    assert SuffixDrafter.proposes_trees(worker.options)
    assert not SuffixDrafter.proposes_trees(SuffixOptions())


def test_crossed_lengths_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"min_match \(4\) must not exceed max_match \(3\)"):
        SuffixOptions(min_match=4, max_match=3)
