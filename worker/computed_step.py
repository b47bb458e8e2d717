"""One step after its forward pass: what sampling, verifying and drafting share."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from dovetail.contracts.step import DraftCounts, StepPlan, TokenLogprobs
from dovetail.worker.input_batch import InputBatch, StepInputs


@dataclass(slots=True)
class StepTokens:
    """The tokens of one step, as they are drawn; dictionaries are keyed by batch index."""

    tokens: np.ndarray
    """int64 [R, most tokens of a request]"""
    counts: np.ndarray
    """int64 [R]: how many of them each request got."""
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    draft_counts: dict[int, DraftCounts] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    drafter_errors: dict[int, str] = field(default_factory=dict)
    num_next_drafts: dict[int, int] = field(default_factory=dict)
    idle_drafters: frozenset[str] = frozenset()

    def put(self, index: int, tokens: list[int]) -> None:
        """The tokens of the request with one batch index."""
        self.tokens[index, : len(tokens)] = tokens
        self.counts[index] = len(tokens)

    def flat(self) -> list[int]:
        """All tokens, one request after the other."""
        flat: list[int] = self.tokens[np.arange(self.tokens.shape[1]) < self.counts[:, None]].tolist()
        return flat

    def counts_or_none(self) -> list[int] | None:
        """Tokens per request; None where each got exactly one."""
        if self.tokens.shape[1] == 1 and self.counts.all():
            return None
        counts: list[int] = self.counts.tolist()
        return counts


def no_tokens(plan: StepPlan) -> StepTokens:
    """The arrays of a step, before any token is drawn."""
    width = 1 if plan.num_drafts is None else max(plan.num_drafts) + 1
    return StepTokens(np.empty((len(plan.keys), width), np.int64), np.zeros(len(plan.keys), np.int64))


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """Inputs, states and tokens of one step."""

    plan: StepPlan
    inputs: StepInputs
    batch: InputBatch
    """Grows by the tokens that are drawn."""
    hidden: torch.Tensor
    """[T, hidden_size]: the target's last states, one row per query token."""
    layer_states: torch.Tensor | None
    """[T, number of layers * hidden_size]: states between layers that some drafter wants; None if none does."""
    tokens: StepTokens
    """Filled by sampling and verifying."""
