"""Draws from rows of logits: the token that each gives, and what an acceptance rule is told of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.contracts.operators import Operators
from dovetail.nn.row_max import row_max
from dovetail.runner.random_streams import SAMPLE, uniforms
from dovetail.runner.sampling_ops import Truncation, draw, normalized, truncated_weights

NOTHING_LEFT = (
    "no token is left to sample: allowed_token_ids, bad_words, min_tokens, logit_bias and logits processors together "
    "mask the whole vocabulary; relax one of them"
)
NOT_FINITE = "the model's logits hold NaN or infinity; its weights may be damaged, or overflow in this dtype"


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
            drawn = _drawn(drawn, self._logits, self._rows, self._positions, self._operators)
        tokens: list[int] = drawn.tolist()
        return tokens

    def probs(self, start: int, end: int) -> Tensor:
        """float32 [end - start, vocab_size] of the rows from `start` to `end`, which are of one request: one-hot for a
        greedy one, zeros for rows that failed."""
        logits = self._logits[start:end]
        if self._rows is not None and self._rows["temperature"][start]:
            found = normalized(_weights(logits, self._rows[start:end]))
        else:
            found = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
            found.scatter_(1, self._best[start:end, None], 1.0)
        failed = [row - start for row in self.failed if start <= row < end]
        if failed:
            found[failed] = 0.0
        return found


def choose(
    logits: Tensor, rows: NDArray[np.void], positions: NDArray[np.int64], operators: Operators
) -> tuple[Tensor, Tensor]:
    """The token of each row, and each row's highest logit: int64 [n], [n]."""
    highest, best = row_max(logits)
    return _drawn(best, logits, rows, positions, operators), highest


def _drawn(
    best: Tensor, logits: Tensor, rows: NDArray[np.void], positions: NDArray[np.int64], operators: Operators
) -> Tensor:
    """The token of each row, int64 [n]: the `best` one of greedy rows, a draw for others."""
    tokens = best
    sampled = np.flatnonzero(rows["temperature"])
    for start in range(0, len(sampled), step := _rows_at_once(logits)):
        part = sampled[start : start + step]
        index = torch.from_numpy(part).to(logits.device)
        selected = logits if len(part) == len(rows) else logits[index]
        chosen = uniforms(rows["seed"][part], SAMPLE, positions[part])
        drawn = _draw(selected, rows[part], torch.from_numpy(chosen).to(logits.device), operators)
        tokens = drawn if len(part) == len(rows) else tokens.index_copy(0, index, drawn)
    return tokens


def _draw(logits: Tensor, rows: NDArray[np.void], chosen: Tensor, operators: Operators) -> Tensor:
    """Tokens of rows that are not greedy: int64 [n]."""
    truncation = _truncation(rows, logits.device)
    drawn = operators.draw(logits, truncation.temperature, truncation.min_p, truncation.top_k, truncation.top_p, chosen)
    return draw(_weights(logits, rows), chosen) if drawn is None else drawn


def _rows_at_once(logits: Tensor) -> int:
    """On a CPU, as many rows as temporaries of 4 MiB hold: larger ones are mapped anew each time, and the page
    faults cost more than the arithmetic."""
    return max(1, 2**20 // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(logits))


def _weights(logits: Tensor, rows: NDArray[np.void]) -> Tensor:
    """Weights of rows that are not greedy: float32 [n, vocab_size]."""
    device, vocab_size = logits.device, logits.shape[1]
    truncation = _truncation(rows, device)
    truncated = np.flatnonzero((rows["top_k"] < vocab_size) | (rows["top_p"] < 1))
    index = torch.from_numpy(truncated).to(device) if len(truncated) else None
    return truncated_weights(logits.float(), truncation, index)


def _truncation(rows: NDArray[np.void], device: torch.device) -> Truncation:
    def column(name: str) -> Tensor:
        return torch.from_numpy(rows[name].copy()).to(device, non_blocking=True)

    return Truncation(column("temperature"), column("min_p"), column("top_k"), column("top_p"))


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
