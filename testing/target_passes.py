"""The target's passes in the suite of draft workers: what `RunsTarget` drafters get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import numpy as np
import torch

from dovetail.contracts.draft_target import TargetPasses


class SuitePasses(TargetPasses):
    """A target whose state at a position follows from the tokens of this draft up to there and from the layers that are
    left out, and which takes no position out of order."""

    def __init__(self, vocab_size: int, hidden_size: int, num_layers: int):
        generator = torch.Generator().manual_seed(1)
        self._table = torch.randn(vocab_size, hidden_size, generator=generator)
        self._layers = torch.randn(num_layers, hidden_size, generator=generator)
        self._first: dict[int, int] = {}
        """By seq_id, the position of the last known token."""
        self._written: dict[int, list[int]] = {}
        """By seq_id, the draft's tokens from there on."""

    def begin(self, num_known: Mapping[int, int]) -> None:
        """A batch with so many known tokens of each request comes."""
        self._first = {seq_id: count - 1 for seq_id, count in num_known.items()}
        self._written = {seq_id: [] for seq_id in num_known}

    def run(
        self, seq_ids: Sequence[int], starts: np.ndarray, counts: np.ndarray, token_ids: np.ndarray, skipped: Set[int]
    ) -> torch.Tensor:
        """As `TargetPasses.run`."""
        assert skipped < set(range(len(self._layers))), "layers that the target does not have, or all of them"
        assert len(token_ids) == sum(counts), "one token for each position"
        run = self._layers[[layer for layer in range(len(self._layers)) if layer not in skipped]].sum(0)
        rows, end = [], 0
        for seq_id, first, count in zip(seq_ids, starts, counts, strict=True):
            tokens = [int(token) for token in token_ids[end : end + count]]
            end += int(count)
            assert count >= 1, "a request without query tokens"
            written, place = self._written[seq_id], int(first) - self._first[seq_id]
            assert 0 <= place <= len(written), "a position that the target computed, or behind one that nobody wrote"
            written[place:] = tokens
            for index in range(place, len(written)):
                weights = 0.5 ** torch.arange(index, -1, -1.0)
                rows.append(weights @ self._table[written[: index + 1]] + run)
        return torch.stack(rows)
