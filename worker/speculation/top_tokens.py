"""The target's most likely tokens after each row of a step, for drafters that read them (`ReadsTopTokens`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dovetail.contracts.draft_target import TopTokens
from dovetail.contracts.errors import PluginError
from dovetail.nn.host_copies import on_device

MOST_STEPS = 64
"""Steps of a request whose rows wait for its drafter; older ones are dropped."""


@dataclass(frozen=True)
class RowsOfRequest:
    """The rows of logits of one request in one step."""

    seq_id: int
    drafter: str
    start: int
    """Index of the first row, that of the last known token; the others follow."""
    parents: Sequence[int]
    """As `TopTokens.parents`, one per row."""


class TopTokenRecords:
    """What waits for the drafters of a rank. `counts`: by drafter, how many tokens of each row it reads."""

    def __init__(self, counts: Mapping[str, int]):
        self._counts = dict(counts)
        self._waiting: dict[int, deque[TopTokens]] = {}
        """By seq_id, one entry per step."""

    @property
    def drafters(self) -> frozenset[str]:
        """Drafters that read them."""
        return frozenset(self._counts)

    def note(self, logits: torch.Tensor, follows: np.ndarray, requests: Sequence[RowsOfRequest]) -> None:
        """Keeps what the rows of `requests` say.

        Args:
            logits: [M, vocab_size], of requests of any drafter.
            follows: integers [M], the input of each row.
            requests: those whose drafters read top tokens.
        """
        if not requests:
            return
        rows = np.concatenate([np.arange(one.start, one.start + len(one.parents)) for one in requests])
        wanted = logits if len(rows) == len(logits) else logits[on_device(rows, logits.device)]
        most = max(self._counts[one.drafter] for one in requests)
        ids = wanted.topk(most, dim=-1).indices.to(torch.int32).cpu().numpy()
        end = 0
        for one in requests:
            start, end = end, end + len(one.parents)
            found = TopTokens(
                follows[one.start : one.start + len(one.parents)].astype(np.int32),
                np.array(one.parents, dtype=np.int32),
                ids[start:end, : self._counts[one.drafter]],
            )
            self._waiting.setdefault(one.seq_id, deque(maxlen=MOST_STEPS)).append(found)

    def take(self, seq_id: int) -> TopTokens | None:
        """What waits of a request, which no longer waits."""
        steps = self._waiting.pop(seq_id, None)
        if steps is None or len(steps) == 1:
            return None if steps is None else steps[0]
        starts = np.cumsum([0, *(len(step.parents) for step in steps)])
        parents = [
            np.where(step.parents < 0, -1, step.parents + start) for step, start in zip(steps, starts[:-1], strict=True)
        ]
        return TopTokens(
            np.concatenate([step.follows for step in steps]),
            np.concatenate(parents).astype(np.int32),
            np.concatenate([step.ids for step in steps]),
        )

    def forget(self, seq_id: int) -> None:
        """A request ended, or its drafter failed it."""
        self._waiting.pop(seq_id, None)


def check_count(drafter: str, count: object, vocab_size: int) -> int:
    """What `num_top_tokens` of a drafter answered. Raises `PluginError` for a number that cannot be."""
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= vocab_size:
        raise PluginError(
            f"{drafter}'s num_top_tokens() answers {count!r}, not a number of tokens from 1 to the target's "
            f"{vocab_size}: correct it, or the option that it follows"
        )
    return count
