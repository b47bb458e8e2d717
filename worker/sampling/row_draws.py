"""Draws from rows of logits: the token that each gives, and what an acceptance rule is told of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.contracts.operators import Operators
from dovetail.nn.row_max import row_max
from dovetail.worker.sampling.random_streams import SAMPLE, uniforms
from dovetail.worker.sampling.sampling_ops import Truncation, draw, normalized, row_groups, truncated_weights

NOTHING_LEFT = (
    "no token is left to sample: allowed_token_ids, bad_words, min_tokens, logit_bias and logits processors together "
    "mask the whole vocabulary; relax one of them"
)
NOT_FINITE = "the model's logits hold NaN or infinity; its weights may be damaged, or overflow in this dtype"

_LINES = 7


def numbers_room(num_rows: int) -> int:
    """How many int64 `DrawNumbers` of so many rows take."""
    return _LINES * _line(num_rows)


def _line(count: int) -> int:
    # Even, so that each line starts at 16 bytes: Triton compiles a kernel anew for pointers that do not.
    return count + count % 2


@dataclass(frozen=True)
class DrawNumbers:
    """What the rows that are not greedy are drawn with: gathered on the host in one piece, so that it reaches a device
    in one copy, for which nobody waits if it starts in pinned memory."""

    packed: Tensor
    """int64 [7, n or n + 1]: row of the logits; temperature and min_p (float32, in the first half of their line);
    top_k; top_p and the uniforms (the bits of float64); and first in the last line, `shortened`."""
    count: int
    """n"""
    shortened: NDArray[np.int64]
    """int64 [m], ascending: which of the n rows top_k or top_p shorten. On the host, to know how many they are."""

    @property
    def places(self) -> Tensor:
        """int64 [n]: rows of the logits."""
        return self.packed[0, : self.count]

    def truncation(self, start: int, end: int) -> Truncation:
        """Of the rows from `start` to `end` of the n."""
        return Truncation(
            temperature=self.packed[1].view(torch.float32)[start:end],
            min_p=self.packed[2].view(torch.float32)[start:end],
            top_k=self.packed[3, start:end],
            top_p=self.packed[4].view(torch.float64)[start:end],
        )

    def uniforms(self, start: int, end: int) -> Tensor:
        """float64 [end - start]."""
        return self.packed[5].view(torch.float64)[start:end]

    def truncated(self, start: int, end: int) -> Tensor | None:
        """As `truncated_weights` takes it for the rows from `start` to `end`."""
        first, last = np.searchsorted(self.shortened, (start, end)).tolist()
        return self.packed[6, first:last] - start if first < last else None

    def copied_to(self, target: Tensor) -> DrawNumbers:
        """The same in `target`, int64 [>= numbers_room(n)]; the host does not wait, so `packed` has to stand still."""
        packed = target[: self.packed.numel()].view(self.packed.shape)
        packed.copy_(self.packed, non_blocking=True)
        return replace(self, packed=packed)

    def on(self, device: torch.device) -> DrawNumbers:
        """The same on a device, which may be waited for."""
        return replace(self, packed=self.packed.to(device))


def gather_numbers(
    rows: NDArray[np.void], positions: NDArray[np.int64] | None, vocab_size: int, host: Tensor | None = None
) -> DrawNumbers:
    """The numbers of a step's rows, in host memory: in `host` (int64, `numbers_room`) where it is given.

    `positions`: int64 [len(rows)], of the tokens to draw; None where only distributions are wanted.
    """
    sampled = np.flatnonzero(rows["temperature"])
    count = len(sampled)
    if host is None:
        host = torch.empty(numbers_room(count), dtype=torch.int64)
    packed = host[: numbers_room(count)].view(_LINES, _line(count))
    lines, part = packed.numpy(), rows[sampled]
    shortened = np.flatnonzero((part["top_k"] < vocab_size) | (part["top_p"] < 1))
    lines[0, :count] = sampled
    lines[1].view(np.float32)[:count] = part["temperature"]
    lines[2].view(np.float32)[:count] = part["min_p"]
    lines[3, :count] = part["top_k"]
    lines[4].view(np.float64)[:count] = part["top_p"]
    if positions is not None and count:
        lines[5].view(np.float64)[:count] = uniforms(part["seed"], SAMPLE, positions[sampled])
    lines[6, : len(shortened)] = shortened
    return DrawNumbers(packed, count, shortened)


class TargetRows:
    """The target's distributions behind known tokens and drafts, for an acceptance rule: what it does not look at is
    not computed."""

    def __init__(
        self,
        logits: Tensor,
        rows: NDArray[np.void] | None,
        positions: NDArray[np.int64],
        operators: Operators,
        failed: Mapping[int, str],
    ):
        """`rows`: the sampler's numbers of each row; None where all rows are greedy."""
        self._logits = logits
        self._rows = rows
        self._positions = positions
        self._operators = operators
        highest, self._best = row_max(logits)
        self.failed: Mapping[int, str] = unusable(on_host(highest)) | dict(failed)
        """Rows from which nothing can be drawn, with the message for the user of their request."""

    def tokens(self, start: int, end: int) -> list[int]:
        """[end - start]: the token that `Sampler.sample` would draw from each of these rows."""
        return self._tokens[start:end]

    @cached_property
    def _tokens(self) -> list[int]:
        """[M]; of the whole batch, which takes one transfer from the device."""
        drawn = self._best
        if self._rows is not None:
            numbers = gather_numbers(self._rows, self._positions, self._logits.shape[1]).on(self._logits.device)
            drawn = _drawn(drawn, self._logits, numbers, self._operators)
        tokens: list[int] = drawn.tolist()
        return tokens

    def probs(self, rows: NDArray[np.int64]) -> Tensor:
        """float32 [len(rows), vocab_size], of rows of whichever requests: one-hot for greedy ones, zeros for rows that
        failed. What it takes in transfers to the device does not depend on how many requests they are of."""
        logits = self._logits
        index = torch.from_numpy(rows).to(logits.device)
        found = torch.zeros(len(rows), logits.shape[1], dtype=torch.float32, device=logits.device)
        if self._rows is None or not self._rows["temperature"][rows].all():
            found.scatter_(1, self._best[index][:, None], 1.0)
        if self._rows is not None:
            numbers = gather_numbers(self._rows[rows], None, logits.shape[1]).on(logits.device)
            for start, end in row_groups(numbers.count, logits):
                places = numbers.places[start:end]
                found.index_copy_(0, places, normalized(_weights(logits[index[places]], numbers, start, end)))
        failed = [place for place, row in enumerate(rows.tolist()) if row in self.failed] if self.failed else []
        if failed:
            found[failed] = 0.0
        return found


def choose(logits: Tensor, numbers: DrawNumbers, operators: Operators) -> tuple[Tensor, Tensor]:
    """The token of each row, and each row's highest logit: int64 [n], [n]. `numbers` are on the logits' device."""
    highest, best = row_max(logits)
    return _drawn(best, logits, numbers, operators), highest


def _drawn(best: Tensor, logits: Tensor, numbers: DrawNumbers, operators: Operators) -> Tensor:
    """The token of each row, int64 [n]: the `best` one of greedy rows, a draw for others."""
    tokens = best
    is_every_row = numbers.count == len(logits)
    for start, end in row_groups(numbers.count, logits):
        index = numbers.places[start:end]
        part = logits[start:end] if is_every_row else logits[index]
        drawn = _draw(part, numbers, start, end, operators)
        tokens = drawn if len(drawn) == len(logits) else tokens.index_copy(0, index, drawn)
    return tokens


def _draw(logits: Tensor, numbers: DrawNumbers, start: int, end: int, operators: Operators) -> Tensor:
    """Tokens of the rows from `start` to `end` of those that are not greedy: int64 [end - start]."""
    truncation, chosen = numbers.truncation(start, end), numbers.uniforms(start, end)
    drawn = operators.draw(logits, truncation.temperature, truncation.min_p, truncation.top_k, truncation.top_p, chosen)
    return draw(_weights(logits, numbers, start, end), chosen) if drawn is None else drawn


def _weights(logits: Tensor, numbers: DrawNumbers, start: int, end: int) -> Tensor:
    """Weights of the rows from `start` to `end` of those that are not greedy: float32 [end - start, vocab_size]."""
    return truncated_weights(logits.float(), numbers.truncation(start, end), numbers.truncated(start, end))


def on_host(highest: Tensor) -> NDArray[np.float32]:
    values: NDArray[np.float32] = highest.float().cpu().numpy()
    return values


def unusable(values: NDArray[np.float32]) -> dict[int, str]:
    """Rows from which nothing can be drawn, told by their highest logit, with the reason."""
    if np.isfinite(values).all():
        return {}
    return {
        int(row): NOTHING_LEFT if values[row] == -np.inf else NOT_FINITE for row in np.flatnonzero(~np.isfinite(values))
    }
