from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.worker.speculation.waiting_states import Span, WaitingStates

NUM_KEYS = 3


def states_of(seq_ids: list[int], positions: list[int]) -> torch.Tensor:
    """Rows that say whose they are and of which position."""
    return torch.tensor([[seq_id, position] for seq_id, position in zip(seq_ids, positions, strict=True)])


@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, NUM_KEYS - 1), min_size=1), st.booleans(), st.sampled_from([None, 0, 1])),
        max_size=40,
    )
)
def test_each_position_is_handed_over_once_in_order(steps: list[tuple[set[int], bool, int | None]]) -> None:
    """Requests take part in steps as they like, steps wait or do not, and requests go back now and then."""
    waiting = WaitingStates(block_size=4)
    position, seen = [0] * NUM_KEYS, [0] * NUM_KEYS
    for chosen, waits, goes_back in steps:
        if goes_back is not None:
            # Preempted: it begins anew, and what waits of it is worth nothing.
            position[goes_back] = seen[goes_back] = 0
        seq_ids = sorted(chosen)
        now = [position[seq_id] for seq_id in seq_ids]
        last = states_of(seq_ids, now)
        if waits:
            waiting.keep(seq_ids, range(len(seq_ids)), now, (last, None))
        else:
            joined = [waiting.join(seq_id, Span(now[i], np.array([i]))) for i, seq_id in enumerate(seq_ids)]
            together, layers = waiting.join_states((last, None), seq_ids)
            assert together is not None
            assert layers is None
            for seq_id, span in zip(seq_ids, joined, strict=True):
                first = span.first_position
                assert first == seen[seq_id]
                seen[seq_id] = position[seq_id] + 1
                rows = together[torch.from_numpy(span.rows)].tolist()
                assert rows == [[seq_id, p] for p in range(first, seen[seq_id])]
        for seq_id in seq_ids:
            position[seq_id] += 1


def test_it_waits_until_a_block_is_full() -> None:
    waiting = WaitingStates(block_size=4)
    assert waiting.may_wait([0, 5, 2])
    assert not waiting.may_wait([0, 7])
