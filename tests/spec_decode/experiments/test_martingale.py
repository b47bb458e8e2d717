"""What the betting martingale says of sound rules and of wrong ones, on simulated targets and drafts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dovetail.contracts.errors import PluginError
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.speculation import AcceptanceRule, Draft, Verdict, VerifyRequest
from dovetail.spec_decode.experiments.judging import LOSSY_BELOW
from dovetail.spec_decode.experiments.martingale import Evidence, observe, weigh
from dovetail.spec_decode.experiments.witness import Witness, WitnessOptions, read_evidence
from dovetail.spec_decode.rejection import RejectionRule
from dovetail.testing.acceptance_suite import request_over

VOCAB = 12
RUNS = 3000
TOKENS = 400


class Readily(RejectionRule):
    """Accepts 15% too readily."""

    def accepts(self, p: float, q: float, uniform: float) -> bool:
        return uniform * q < 1.15 * p

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        return [self._sample_tree(with_probs(request), request.target.probs()) for request in requests]


def with_probs(request: VerifyRequest) -> VerifyRequest:
    """What was not drawn counts as drawn from a distribution with all its mass on the draft."""
    draft = request.draft
    if draft.probs is not None:
        return request
    probs = torch.nn.functional.one_hot(torch.tensor(draft.token_ids), VOCAB).float()
    return replace(request, draft=replace(draft, probs=probs))


def chosen(rng: np.random.Generator, count: int, *, leak: float = 0.0) -> NDArray[np.float64]:
    """Rows as `weigh` takes them: tokens that come from the target, but for the share `leak` that is the draft's own
    token. Targets of all kinds, from flat to certain."""
    sharpness = rng.uniform(0.1, 6, (count, 1))
    logits = rng.normal(size=(count, VOCAB)) * sharpness
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    draft = np.where(rng.random(count) < 0.6, p.argmax(1), rng.integers(0, VOCAB, count))
    token = (p.cumsum(1) > rng.random((count, 1))).argmax(1)
    token = np.where(rng.random(count) < leak, draft, token)
    rows = np.arange(count)
    top = p.max(1)
    return np.c_[token == draft, p[rows, draft], p[rows, token] / top, (p * p).sum(1) / top]


@pytest.mark.parametrize("look_often", [False, True])
def test_a_sound_rule_is_accused_less_often_than_once_in_a_thousand_runs(look_often: bool) -> None:
    rng = np.random.default_rng(0)
    accused = doubted = 0
    for _ in range(RUNS):
        rows = chosen(rng, TOKENS)
        looks = range(50, TOKENS + 1, 50) if look_often else (TOKENS,)
        p = min(weigh(rows[:count]).p for count in looks)
        accused += p < LOSSY_BELOW
        doubted += p < 0.05
    assert accused / RUNS < LOSSY_BELOW
    # The bound itself: whatever one does, at most so often.
    assert doubted / RUNS < 0.05


def test_a_leak_of_the_draft_is_found_as_often_as_stated() -> None:
    rng = np.random.default_rng(1)
    sound = weigh(chosen(rng, 2000))
    leak = sound.detectable(LOSSY_BELOW) * sound.expected / (sound.places - sound.expected)
    found = np.mean([weigh(chosen(rng, 2000, leak=leak)).p < LOSSY_BELOW for _ in range(200)])
    assert found > 0.85
    assert np.mean([weigh(chosen(rng, 2000, leak=leak / 3)).p < LOSSY_BELOW for _ in range(200)]) < 0.5


def test_text_that_is_too_likely_is_found_without_any_draft() -> None:
    rng = np.random.default_rng(2)
    p = rng.dirichlet(np.full(VOCAB, 0.5), 300)
    rows = [observe(row, None, int(row.argmax())) for row in p]
    found = weigh(np.array([[one.overrated, one.expected_overrated, one.likely, one.expected_likely] for one in rows]))
    assert found.places == 0
    assert found.excess is None
    assert found.p < LOSSY_BELOW


def test_nothing_seen_is_no_evidence(tmp_path: Path) -> None:
    found = read_evidence(tmp_path / "nothing")
    assert (found.places, found.p, found.excess) == (0, 1.0, None)
    assert math.isinf(found.detectable(LOSSY_BELOW))


def requests(rng: np.random.Generator, count: int, *, drawn: bool) -> Iterator[VerifyRequest]:
    """Trees of five nodes over targets that resemble the drafts; siblings are drawn without replacement."""
    parents = [-1, -1, 0, 0, 1]
    for _ in range(count):
        target = rng.dirichlet(np.full(VOCAB, 0.4), len(parents) + 1)
        probs = 0.3 * target[[parent + 1 for parent in parents]] + 0.7 * rng.dirichlet(np.full(VOCAB, 1.0), 5)
        tokens: list[int] = []
        for node, parent in enumerate(parents):
            probs[node, [tokens[other] for other in range(node) if parents[other] == parent]] = 0
            probs[node] /= probs[node].sum()
            tokens.append(int(rng.choice(VOCAB, p=probs[node])) if drawn else int(probs[node].argmax()))
        draft = Draft(tokens, parents, torch.from_numpy(probs).float() if drawn else None)
        uniforms = rng.random(2 * len(parents) + 1)
        rows = torch.from_numpy(target).float()
        yield request_over(draft, rows, SamplingParams(temperature=1.0), uniforms[:5], uniforms[5:])


def watch(rule: type[AcceptanceRule], path: Path, given: Sequence[VerifyRequest]) -> Evidence:
    module = f"{rule.__module__}:{rule.__qualname__}"
    witness = Witness(WitnessOptions(rule=module, path=path))
    verdicts = witness.verify(given)
    for verdict, alone in zip(verdicts[:200], rule(PluginOptions()).verify(given[:200]), strict=True):
        assert (list(verdict.accepted), verdict.next_token_id) == (list(alone.accepted), alone.next_token_id)
    return read_evidence(path)


@pytest.mark.parametrize("drawn", [True, False])
def test_a_rule_that_accepts_too_readily_is_found_and_the_sound_one_is_not(tmp_path: Path, drawn: bool) -> None:
    given = list(requests(np.random.default_rng(3), 3000, drawn=drawn))
    sound = watch(RejectionRule, tmp_path / "sound.f64", given)
    assert sound.p > 0.05
    wrong = watch(Readily, tmp_path / "wrong.f64", given)
    assert wrong.p < LOSSY_BELOW
    assert wrong.excess is not None
    assert wrong.excess > 1.02


def test_a_witness_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="which every acceptance_rule must derive from"):
        Witness(WitnessOptions(rule="dovetail.spec_decode.ngram:NgramDrafter", path=tmp_path / "x"))
