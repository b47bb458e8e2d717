"""Which steps run as graphs, and how they are filled up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.worker.graph_ladder import GraphLadder, GraphShape, ladder_sizes, padded
from dovetail.worker.input_batch import StepInputs

BLOCK = 4


def step(counts: list[int], cached: list[int], trees: bool = False) -> StepInputs:
    """Requests with so many query tokens behind so many cached ones, each in pages of its own."""
    lens = np.array(counts, dtype=np.int32)
    start = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    seq_lens = lens + np.array(cached, dtype=np.int32)
    width = -(-int(seq_lens.max()) // BLOCK)
    table = np.arange(1, 1 + len(counts) * width, dtype=np.int32).reshape(len(counts), width)
    positions = np.concatenate([c + np.arange(n) for c, n in zip(cached, counts, strict=True)]).astype(np.int64)
    rows = np.repeat(np.arange(len(counts)), lens)
    slots = table[rows, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    masks = {0: np.ones((counts[0], counts[0]), dtype=bool)} if trees else {}
    return StepInputs(
        np.arange(len(counts)),
        start,
        seq_lens,
        positions,
        positions,
        [table],
        [slots],
        np.zeros_like(lens),
        np.ones(len(counts), dtype=bool),
        masks,
    )


LADDER = GraphLadder([1, 2, 4, 8], [1, 4], max_num_tokens=16, max_model_len=64)


@pytest.mark.parametrize(
    ("counts", "shape"),
    [
        ([1], GraphShape(1, 1)),
        ([1, 1, 1], GraphShape(1, 4)),
        ([2, 1], GraphShape(4, 2)),
        ([4, 4, 4], GraphShape(4, 4)),
        ([4] * 5, None),  # 8 x 4 tokens are more than a step may have
        ([5], None),
        ([1] * 9, None),
    ],
)
def test_the_smallest_shape_that_holds_a_step(counts: list[int], shape: GraphShape | None) -> None:
    assert LADDER.choose(step(counts, [3] * len(counts))) == shape


def test_trees_and_full_sequences_run_eagerly() -> None:
    assert LADDER.choose(step([3], [2], trees=True)) is None
    assert LADDER.choose(step([2], [62])) is None
    assert LADDER.choose(step([4], [60])) is not None


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 40)), min_size=1, max_size=4))
def test_a_filled_step_holds_the_real_one(requests: list[tuple[int, int]]) -> None:
    """Every real token keeps position, page and slot; what fills up stands behind it and writes to block 0."""
    inputs = step([n for n, _ in requests], [c for _, c in requests])
    shape = LADDER.choose(inputs)
    assert shape is not None
    filled = padded(inputs, shape, BLOCK)
    assert len(filled.seq_lens) == shape.num_requests
    assert filled.query_start.tolist() == [i * shape.query_len for i in range(shape.num_requests + 1)]
    assert np.array_equal(filled.slot_mappings[0][filled.token_indices], inputs.slot_mappings[0])
    others = np.setdiff1d(np.arange(shape.num_tokens), filled.token_indices)
    assert (filled.slot_mappings[0][others] == 0).all()
    requests_of = filled.token_indices // shape.query_len
    starts = filled.seq_lens[requests_of] - shape.query_len
    assert np.array_equal(starts + filled.token_indices % shape.query_len, inputs.positions)
    width = inputs.block_tables[0].shape[1]
    assert np.array_equal(filled.block_tables[0][: len(requests), :width], inputs.block_tables[0])
    assert (filled.block_tables[0][len(requests) :] == 0).all()
    assert (filled.block_tables[0].shape[1] * BLOCK >= filled.seq_lens).all()


@pytest.mark.parametrize("most", [1, 3, 100, 256, 2000])
def test_the_ladder_ends_where_the_scheduler_does(most: int) -> None:
    sizes = ladder_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(most, 512)
    assert len(sizes) < 30
