"""Log probabilities of the distribution that tokens are drawn from, against a float64 count token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.contracts.sampling import SamplingParams
from dovetail.worker.sampling.draw import DrawParams
from dovetail.worker.sampling.logprobs import processed_logprobs

VOCAB = 40


def scaled_log_probs(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """float64 [vocab_size]."""
    return (logits.double() / temperature).log_softmax(-1)


def kept_tokens(logits: torch.Tensor, sampling: SamplingParams) -> list[int]:
    """What min_p, top_k and top_p keep of a row without ties, the likeliest first."""
    probs = scaled_log_probs(logits, sampling.temperature).exp().tolist()
    kept = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept = [token for token in kept if probs[token] >= sampling.min_p * probs[kept[0]]]
    kept = kept[: sampling.top_k or None]
    if sampling.top_p == 1:
        return kept  # a rounded sum may reach the total before the last token
    total, nucleus = sum(probs[token] for token in kept), 0.0
    for count, token in enumerate(kept, 1):
        nucleus += probs[token]
        if nucleus >= sampling.top_p * total:
            return kept[:count]
    return kept


SAMPLING = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    min_p=st.sampled_from([0.0, 0.05, 0.3]),
    top_k=st.sampled_from([0, 1, 5, 39]),
    top_p=st.sampled_from([0.2, 0.77, 1.0]),
)


@settings(max_examples=60, deadline=None)
@given(sampling=st.lists(SAMPLING, min_size=1, max_size=4), seed=st.integers(0, 2**31))
def test_log_probabilities_and_mass_are_those_of_what_is_kept(sampling: list[SamplingParams], seed: int) -> None:
    logits = torch.randn(len(sampling), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    kept = [kept_tokens(row, own) for row, own in zip(logits, sampling, strict=True)]
    tokens = np.array([tokens[-1] for tokens in kept])
    found = processed_logprobs(logits, DrawParams.of(sampling, VOCAB), tokens, -1)
    for row, own, tokens_kept, entry in zip(logits, sampling, kept, found, strict=True):
        expected = scaled_log_probs(row, own.temperature)
        mass = float(expected[tokens_kept].exp().sum())
        assert entry.surviving_mass == pytest.approx(mass, rel=1e-5)
        assert entry.top_ids == tokens_kept
        assert entry.top_logprobs == pytest.approx((expected[tokens_kept] - math.log(mass)).tolist(), abs=1e-5)
        assert (entry.token_id, entry.rank) == (tokens_kept[-1], len(tokens_kept))
        assert math.fsum(math.exp(logprob) for logprob in entry.top_logprobs) == pytest.approx(1.0, abs=1e-5)


def test_a_greedy_token_is_the_only_one_left_of_temperature_1() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    sampling = [SamplingParams(temperature=0), SamplingParams(temperature=0.5, top_k=3)]
    tokens = logits.argmax(-1).numpy()
    greedy, drawn = processed_logprobs(logits, DrawParams.of(sampling, VOCAB), tokens, 4)
    assert (greedy.logprob, greedy.rank, greedy.top_ids, greedy.top_logprobs) == (0.0, 1, [int(tokens[0])], [0.0])
    assert greedy.surviving_mass == pytest.approx(float(logits[0].softmax(-1).max()))
    assert len(drawn.top_ids) == 3


def test_without_truncation_all_of_the_mass_survives() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    params = DrawParams.of([SamplingParams(temperature=0.7)] * 3, VOCAB)
    found = processed_logprobs(logits, params, np.array([5, 6, 7]), 0)
    assert [entry.surviving_mass for entry in found] == [1.0] * 3


def test_masked_tokens_are_no_alternatives() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[0, 10:] = -torch.inf
    entry = processed_logprobs(logits, DrawParams.of([SamplingParams()], VOCAB), np.array([3]), -1)[0]
    assert sorted(entry.top_ids) == list(range(10))
    assert entry.surviving_mass == 1.0


def test_a_token_that_was_drawn_counts_as_kept() -> None:
    """Other operators may round the border of top_p to the other side; a log probability of minus infinity would then
    make a trainer's ratio infinite."""
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    entry = processed_logprobs(logits, DrawParams.of([SamplingParams(top_k=2)], 4), np.array([2]), -1)[0]
    expected = scaled_log_probs(logits[0], 1.0)
    mass = float(expected[:3].exp().sum())
    assert entry.top_ids == [0, 1, 2]
    assert entry.surviving_mass == pytest.approx(mass)
    assert entry.logprob == pytest.approx(float(expected[2]) - math.log(mass), abs=1e-6)
