"""What becomes of one step once its forward pass is done: shared by sampling, verifying and drafting."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from dovetail.contracts.step import DraftCounts, StepPlan, TokenLogprobs
from dovetail.worker.input_batch import InputBatch, StepInputs


@dataclass(slots=True)
class StepTokens:
    """What a step's sampling came to; dictionaries are keyed by place in the plan."""

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

    def put(self, place: int, tokens: list[int]) -> None:
        """What one request got."""
        self.tokens[place, : len(tokens)] = tokens
        self.counts[place] = len(tokens)

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
    """Of a plan's requests, before anything is drawn."""
    width = 1 if plan.num_drafts is None else max(plan.num_drafts) + 1
    return StepTokens(np.empty((len(plan.keys), width), np.int64), np.zeros(len(plan.keys), np.int64))


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """One step after its forward pass."""

    plan: StepPlan
    inputs: StepInputs
    batch: InputBatch
    """Grows by the tokens that are drawn."""
    hidden: torch.Tensor
    """[rows of the step, hidden size]: the target's last states."""
    layer_states: torch.Tensor | None
    """[rows of the step, states between layers that some drafter wants, flat]; None where none does."""
    tokens: StepTokens
    """Filled as they are drawn."""
