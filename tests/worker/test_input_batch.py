"""The persistent batch: what a step's arrays say after rows have changed hands."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.step import NewRequest, StepPlan
from dovetail.worker.input_batch import InputBatch

BLOCK = 4


def request(seq_id: int, *tables: list[int], num_tokens: int) -> NewRequest:
    return NewRequest(seq_id, str(seq_id), [7] * num_tokens, num_tokens, 0, tables, SamplingParams(), 0)


def step(*new: NewRequest, **changes: list[tuple[int, int, int, list[int]]]) -> StepPlan:
    """All tokens of new requests at once."""
    return StepPlan(0, [r.seq_id for r in new], [len(r.token_ids) for r in new], new_requests=list(new), **changes)


def test_a_row_shows_no_blocks_of_the_request_that_had_it_before() -> None:
    """In any group, also where a longer request beside it makes the table wide."""
    batch = InputBatch(max_num_seqs=2, max_model_len=32, block_size=BLOCK, num_groups=2, max_ahead=0)
    batch.apply(step(request(1, [11, 12, 13, 14], [21, 22, 23, 24], num_tokens=16)))
    batch.apply(step(new_blocks=[(1, 0, 4, [15])]))
    batch.remove(1)
    plan = step(
        request(2, [31], [41], num_tokens=3), request(3, [32, 33, 34, 35, 36], [0, 0, 0, 42, 43], num_tokens=20)
    )
    batch.apply(plan)
    first, second = batch.prepare(plan).block_tables
    np.testing.assert_array_equal(first, [[31, 0, 0, 0, 0], [32, 33, 34, 35, 36]])
    np.testing.assert_array_equal(second, [[41, 0, 0, 0, 0], [0, 0, 0, 42, 43]])


def test_tokens_have_types_where_some_request_of_the_step_has_any() -> None:
    """A row that changes hands keeps none."""
    batch = InputBatch(max_num_seqs=2, max_model_len=32, block_size=BLOCK, num_groups=0, max_ahead=0)
    pair = step(replace(request(1, num_tokens=4), token_types=(0, 0, 1, 1)), request(2, num_tokens=3))
    batch.apply(pair)
    np.testing.assert_array_equal(batch.prepare(pair).token_types, [0, 0, 1, 1, 0, 0, 0])
    batch.remove(1)
    plain = step(request(3, num_tokens=4))
    batch.apply(plain)
    assert batch.prepare(plain).token_types is None
