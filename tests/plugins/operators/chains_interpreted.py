"""The rule `rejection` over the `triton` operator set in Triton's interpreter. Run by test_triton.py in a process of
its own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.speculation import Draft
from dovetail.plugins.operators.triton.operators import TritonOperators
from dovetail.spec_decode.rejection import RejectionRule
from dovetail.testing.acceptance_suite import SIGNIFICANCE, chi_square_p, two_token_counts, verify_request
from dovetail.testing.chain_cases import random_chains
from dovetail.testing.kernel_checks import checked_kernels


@pytest.fixture(autouse=True, scope="module")
def checks() -> Iterator[None]:
    """No launch of this module reads or writes what it must not."""
    with checked_kernels():
        yield


def rejection_rules() -> tuple[RejectionRule, RejectionRule]:
    """With the kernels, and without."""
    fused, plain = RejectionRule(PluginOptions()), RejectionRule(PluginOptions())
    fused.use_operators(TritonOperators(TritonOperators.Options()))
    return fused, plain


@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    vocab_size=st.sampled_from([3, 40, 4097]),
)
@settings(max_examples=25, deadline=None)
def test_chains_are_judged_as_the_rule_does(seed: int, sizes: list[int], vocab_size: int) -> None:
    """Drafts that agree with the target, disagree, and share no token with it."""
    random = np.random.default_rng(seed)
    chains = random_chains(sizes, vocab_size)
    requests = [
        verify_request(Draft(part.token_ids.tolist(), None, part.draft), part.target, random, SamplingParams())
        for part in map(chains.only, range(len(sizes)))
    ]
    fused, plain = rejection_rules()
    assert fused.verify(requests) == plain.verify(requests)


def test_accepted_chains_keep_the_distribution() -> None:
    """250 rounds, as the interpreter is slow: 0.22 of probability that moves between two first tokens has a
    noncentrality of 64. Which tokens come exactly, the test above says."""
    fused, _ = rejection_rules()
    assert chi_square_p(*two_token_counts(fused, [-1, 0], has_probs=True, num_rounds=250)) > SIGNIFICANCE
