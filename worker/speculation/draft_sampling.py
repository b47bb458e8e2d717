"""What speculation borrows of the sampler: distributions of the target's rows for acceptance rules, distributions and
draws for drafters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.contracts.sampling import SamplingParams
from dovetail.nn.host_copies import on_device
from dovetail.nn.row_max import row_max
from dovetail.worker.sampling.draw import DrawParams, distributions, draw, draw_tokens, row_groups
from dovetail.worker.sampling.sampler import Sampler, unusable
from dovetail.worker.sampling.streams import DRAFT, uniforms


def draft_distributions(logits: torch.Tensor, sampling: Sequence[SamplingParams]) -> torch.Tensor:
    """As `DraftSetup.distributions`."""
    params = DrawParams.of(sampling, logits.shape[1])
    return distributions(logits, None if params is None else params.on(logits.device))


def draft_draw(probs: torch.Tensor, uniforms: np.ndarray) -> torch.Tensor:
    """As `DraftSetup.draw`."""
    chosen = on_device(np.asarray(uniforms, dtype=np.float64), probs.device)
    if not len(probs):
        return torch.empty(0, dtype=torch.int64, device=probs.device)
    return torch.cat([draw(probs[start:end], chosen[start:end]) for start, end in row_groups(len(probs), probs)])


def draft_uniforms(
    sampler: Sampler, seq_ids: Sequence[int], positions: NDArray[np.int64], count: int
) -> NDArray[np.float64]:
    """float64 [len(seq_ids), count]: random numbers for rounds whose first drafts are at `positions`."""
    return uniforms(sampler.seeds(seq_ids)[:, None], DRAFT, positions[:, None], np.arange(count))


class TargetRows:
    """What each row of a verify step says of the token that it predicts, after everything that `Sampler.sample` does to
    it: what an acceptance rule does not look at is not computed."""

    def __init__(
        self,
        sampler: Sampler,
        logits: torch.Tensor,
        seq_ids: Sequence[int],
        positions: NDArray[np.int64],
        paths: Sequence[Sequence[int]],
    ):
        """Arguments as for `Sampler.edited`; `logits` are read later."""
        self._sampler = sampler
        self.edited, failed = sampler.edited(logits, seq_ids, positions, paths)
        """[M, vocab_size]: the logits after `Sampler.edited`."""
        self._seq_ids = seq_ids
        self._positions = positions
        highest, self._best = row_max(self.edited)
        self.failed = unusable(highest.float().cpu().numpy()) | failed
        """Rows from which nothing can be drawn, with the message for the user of their request."""

    def tokens(self, start: int, end: int) -> list[int]:
        """[end - start]: the token that `Sampler.sample` would draw from each of these rows."""
        return self._tokens[start:end]

    @cached_property
    def _tokens(self) -> list[int]:
        """[M]; of the whole batch, which takes one transfer from the device."""
        params, drawn = self._sampler.draw_params(self._seq_ids, self._positions), self._best
        if params is not None:
            drawn = draw_tokens(self.edited, drawn, params.on(self.edited.device), self._sampler.operators)
        tokens: list[int] = drawn.tolist()
        return tokens

    def probs(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """float32 [len(rows), vocab_size], of rows of whichever requests: one-hot for greedy ones, zeros for rows that
        failed. What it takes in transfers to the device does not depend on how many requests they are of."""
        device = self.edited.device
        params = self._sampler.draw_params([self._seq_ids[row] for row in rows.tolist()], None)
        chosen = on_device(rows, device)
        found = distributions(self.edited, None if params is None else params.on(device), self._best, chosen)
        failed = [i for i, row in enumerate(rows.tolist()) if row in self.failed] if self.failed else []
        if failed:
            found[failed] = 0.0
        return found
