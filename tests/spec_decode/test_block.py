"""Block verification against enumeration: small vocabularies, where every draft and every outcome can be added up."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.speculation import Draft
from dovetail.spec_decode.block import BlockRule, acceptance_chances
from dovetail.spec_decode.rejection import RejectionRule, residual
from dovetail.testing.acceptance_suite import AcceptanceRuleSuite, request_over, verify_request

Model = Mapping[tuple[int, ...], np.ndarray]
"""By prefix, the distribution of the next token."""


class TestBlockRule(AcceptanceRuleSuite):
    plugin = BlockRule


def random_model(random: np.random.Generator, vocab_size: int, length: int, *, zeros: bool) -> Model:
    """Every next token's distribution depends on all before it; with `zeros` some tokens are impossible."""
    rows = {}
    for count in range(length + 1):
        for prefix in itertools.product(range(vocab_size), repeat=count):
            row = random.dirichlet(np.full(vocab_size, 0.6)) + 1e-4
            if zeros and random.random() < 0.5:
                row[random.integers(vocab_size)] = 0
            rows[prefix] = row / row.sum()
    return rows


def rows_along(model: Model, path: tuple[int, ...], count: int) -> torch.Tensor:
    return torch.from_numpy(np.array([model[path[:i]] for i in range(count)])).float()


def probability(model: Model, path: tuple[int, ...]) -> float:
    return float(np.prod([model[path[:i]][token] for i, token in enumerate(path)]))


def outcomes(target: Model, draft: Model, vocab_size: int, length: int) -> tuple[dict[tuple[int, ...], float], float]:
    """The exact distribution of the first `length` tokens that one round emits, what is missing being continued from
    the target; and the expected number of accepted drafts. Drafts, stops and bonus tokens are enumerated."""
    emitted = dict.fromkeys(itertools.product(range(vocab_size), repeat=length), 0.0)
    accepted = 0.0
    for path in itertools.product(range(vocab_size), repeat=length):
        drawn = probability(draft, path)
        p_rows, q_rows = rows_along(target, path, length + 1), rows_along(draft, path, length)
        (surplus,), (chances,) = acceptance_chances([p_rows], [q_rows], [np.array(path)])
        left = drawn
        for stop in range(length, -1, -1):
            stops = left * chances[stop]
            left -= stops
            accepted += stop * stops
            if stop == length:
                emitted[path] += stops
                continue
            rest = residual(p_rows[stop] * float(surplus[stop]), q_rows[stop])
            for end in itertools.product(range(vocab_size), repeat=length - stop):
                whole = (*path[:stop], *end)
                tail = np.prod([target[whole[:i]][whole[i]] for i in range(stop + 1, length)])
                emitted[whole] += stops * float(rest[end[0]]) * float(tail)
    return emitted, accepted


def accepted_by_rejection(target: Model, draft: Model, vocab_size: int, length: int) -> float:
    """Leviathan et al. 2023: each token with min(1, p / q), up to the first that is refused."""
    total = 0.0
    for count in range(1, length + 1):
        for path in itertools.product(range(vocab_size), repeat=count):
            rows = [(target[path[:i]][x], draft[path[:i]][x]) for i, x in enumerate(path)]
            total += float(np.prod([min(p, q) for p, q in rows]))
    return total


@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(2, 1), (2, 4), (3, 2), (3, 3), (4, 2)]),
    zeros=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_the_target_is_left_exactly_and_no_less_is_accepted_than_by_rejection(
    seed: int, shape: tuple[int, int], zeros: bool
) -> None:
    random = np.random.default_rng(seed)
    target, draft = random_model(random, *shape, zeros=zeros), random_model(random, *shape, zeros=False)
    emitted, accepted = outcomes(target, draft, *shape)
    for path, came in emitted.items():
        assert came == pytest.approx(probability(target, path), abs=2e-6)
    assert accepted >= accepted_by_rejection(target, draft, *shape) - 1e-6


def test_a_surplus_makes_up_for_what_comes_after_it() -> None:
    """Where the draft is the target's mirror image twice over, rejection gives away what block verification keeps."""
    rows = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    paths = [path for count in range(3) for path in itertools.product(range(2), repeat=count)]
    target, draft = (dict.fromkeys(paths, row) for row in rows)
    # The paper's example in section 2: 10/9 tokens of two by rejection, 11/9 as a block.
    assert accepted_by_rejection(target, draft, 2, 2) == pytest.approx(10 / 9)
    assert outcomes(target, draft, 2, 2)[1] == pytest.approx(11 / 9)


def test_chances_decide_where_a_chain_ends() -> None:
    random = np.random.default_rng(5)
    target, draft = random_model(random, 3, 3, zeros=False), random_model(random, 3, 3, zeros=False)
    rule = BlockRule(PluginOptions())
    for path in itertools.product(range(3), repeat=3):
        p_rows, q_rows = rows_along(target, path, 4), rows_along(draft, path, 3)
        _, (chances,) = acceptance_chances([p_rows], [q_rows], [np.array(path)])
        for last in range(1, 4):
            # Only the draw of `last` succeeds, and barely.
            uniforms = np.minimum(chances[1:] + 1e-6, 1 - 1e-9)
            uniforms[last - 1] = chances[last] - 1e-6
            standing = np.flatnonzero(uniforms < chances[1:])
            request = request_over(Draft(path, None, q_rows), p_rows, SamplingParams(), uniforms, random.random(4))
            (verdict,) = rule.verify([request])
            assert list(verdict.accepted) == list(range(int(standing[-1]) + 1))


def test_drafts_that_were_not_drawn_and_greedy_requests_get_what_rejection_gives_them() -> None:
    random = np.random.default_rng(3)
    target = torch.from_numpy(random.dirichlet(np.ones(4), 4)).float()
    best = torch.eye(4)[target.argmax(1)]
    drawn = Draft([2, 1, 0], None, torch.full((3, 4), 0.25))
    requests = [
        verify_request(Draft(path), target, random, SamplingParams()) for path in itertools.product(range(4), repeat=3)
    ]
    requests += [verify_request(drawn, best, random, SamplingParams(temperature=0))]
    assert BlockRule(PluginOptions()).verify(requests) == RejectionRule(PluginOptions()).verify(requests)
