"""Where drafts are cut, and that cutting drawn drafts keeps the distribution of the output."""

from __future__ import annotations

import itertools

import pytest
import torch

from dovetail.contracts.speculation import Draft
from dovetail.spec_decode.lengths.confidence import confident_length


@pytest.mark.parametrize(
    ("confidence", "length"),
    [([0.9, 0.9, 0.9], 3), ([0.9, 0.5, 0.9], 1), ([0.4, 1.0, 1.0], 0), ([0.5, 1.0, 0.9], 2)],
)
def test_a_chain_ends_where_the_product_gets_small(confidence: list[float], length: int) -> None:
    assert confident_length(Draft([1, 2, 3], confidence=confidence), 0.5) == length


def test_a_tree_ends_behind_its_last_trusted_node() -> None:
    draft = Draft([1, 2, 3, 4], [-1, -1, 1, 0], confidence=[0.3, 0.9, 0.8, 0.9])
    assert confident_length(draft, 0.5) == 3


def test_a_draft_without_confidences_stays_whole() -> None:
    assert confident_length(Draft([1, 2]), 1.0) == 2


def test_probabilities_stand_in_for_confidences() -> None:
    probs = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.5, 0.5]])
    assert confident_length(Draft([0, 1, 0], probs=probs), 0.5) == 3
    assert confident_length(Draft([0, 0, 0], probs=probs), 0.5) == 2


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.6, 1.0])
def test_cutting_drawn_drafts_leaves_the_distribution_alone(threshold: float) -> None:
    """Exactly, by summing over every draft of two tokens and every outcome of its verification."""
    q = torch.tensor([0.7, 0.2, 0.1])
    p = torch.tensor([0.2, 0.3, 0.5])
    pairs = torch.zeros(3, 3)
    for first, second in itertools.product(range(3), repeat=2):
        kept = confident_length(Draft([first, second], probs=torch.stack((q, q))), threshold)
        pairs += q[first] * q[second] * after([first, second][:kept], p, q)
    torch.testing.assert_close(pairs, p[:, None] * p[None, :])


def after(draft: list[int], p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[3, 3]: distribution of the first two tokens when a chain drawn from q is verified against p (Leviathan et al.
    2023, Algorithm 1); what the round leaves open is drawn from p."""
    residual = (p - q).clamp(min=0)
    residual = residual / residual.sum()
    result = torch.zeros(3, 3)
    chance = 1.0
    for position, token in enumerate(draft[:2]):
        accepted = float(torch.clamp(p[token] / q[token], max=1.0))
        refused = chance * (1 - accepted) * residual
        if position == 0:
            result += refused[:, None] * p[None, :]
        else:
            result[draft[0]] += refused
        chance *= accepted
    if not draft:
        return p[:, None] * p[None, :]
    if len(draft) == 1:
        result[draft[0]] += chance * p
    else:
        result[draft[0], draft[1]] += chance
    return result
