"""`block_sparse` on CPUs: the pattern, against a dense mask; that what is outside is not read; refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.attention_backends.block_sparse.backend import BlockSparseBackend
from dovetail.attention_backends.block_sparse.pattern import (
    BlockPattern,
    BlockSparseOptions,
    VisibleBlocks,
    head_shifts,
)
from dovetail.attention_backends.block_sparse.units import create_items, create_units
from dovetail.contracts.attention import AttentionLayer, AttentionNeed, RotatesAndWrites
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import DeviceInfo, Environment
from dovetail.testing.attention_cases import AttentionCase, CaseShape, random_case
from dovetail.testing.attention_suite import AttentionBackendSuite

patterns = st.fixed_dictionaries(
    {
        "local_blocks": st.integers(1, 4),
        "vert_stride": st.one_of(st.none(), st.integers(1, 6)),
        "sink_blocks": st.integers(0, 2),
        "sparse_block_size": st.sampled_from([16, 32]),
        "heads": st.sampled_from(["same", "sliding", "sliding_groups"]),
    }
)
shapes = st.builds(
    CaseShape,
    block_size=st.sampled_from([8, 16]),
    head_size=st.sampled_from([16, 24]),
    max_requests=st.integers(1, 4),
    max_cached=st.sampled_from([60, 250]),
    max_query=st.sampled_from([1, 5, 70]),
)


def expected(case: AttentionCase, chosen: dict) -> torch.Tensor:
    """[T, num_heads, head_size]"""
    return torch.from_numpy(np.concatenate([of_request(case, request, chosen) for request in case.requests]))


def sees(chosen: dict, query: int, key: int, shift: int) -> bool:
    """Whether the query at one position sees the key at another, as phi-3-small's pattern says, with sinks."""
    size, stride = chosen["sparse_block_size"], chosen["vert_stride"]
    is_local = query // size - key // size < chosen["local_blocks"]
    is_strided = stride is not None and (key // size + shift + 1) % stride == 0
    return key <= query and (is_local or is_strided or key // size < chosen["sink_blocks"])


def shift_of(case: AttentionCase, chosen: dict, head: int) -> int:
    layer = case.layer
    if chosen["heads"] == "same" or chosen["vert_stride"] is None:
        return 0
    count, index = layer.total_heads or layer.num_heads, layer.first_head + head
    if chosen["heads"] == "sliding_groups":
        group = layer.num_heads // layer.num_kv_heads
        count, index = count // group, index // group
    return index * max(1, chosen["vert_stride"] // count)


def of_request(case: AttentionCase, request, chosen: dict) -> np.ndarray:
    layer = case.layer
    query, keys, values = (x.double().numpy() for x in (request.query, request.keys, request.values))
    group = layer.num_heads // layer.num_kv_heads
    output = np.zeros(query.shape)
    for i in range(request.query_len):
        own = request.num_cached + i
        for head in range(layer.num_heads):
            shift = shift_of(case, chosen, head)
            seen = [j for j in range(request.seq_len) if sees(chosen, own, j, shift)]
            scores = keys[seen, head // group] @ query[i, head] * layer.scale
            weights = np.exp(scores - scores.max())
            output[i, head] = weights / weights.sum() @ values[seen, head // group]
    return output


class TestBlockSparse(AttentionBackendSuite):
    """With a pattern that sees everything it is full attention."""

    plugin = BlockSparseBackend
    options = {"local_blocks": 1000}  # noqa: RUF012
    num_cases = 3


def create(case, **chosen):
    return BlockSparseBackend(BlockSparseOptions(**chosen), case.setup)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), shapes, patterns, st.sampled_from([0, 3]))
def test_equals_a_dense_mask(seed, shape, chosen, padding):
    case = random_case(seed, shape)
    actual = case.run_from_scratch(create(case, **chosen), padding)
    torch.testing.assert_close(actual.double(), expected(case, chosen), atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("heads", ["same", "sliding"])
def test_what_is_outside_of_the_pattern_is_not_read(heads):
    """Pages that no query head sees hold NaN."""
    chosen = {"local_blocks": 1, "vert_stride": 32, "sink_blocks": 1, "sparse_block_size": 16, "heads": heads}
    case = random_case(5, CaseShape(block_size=8, head_size=16, max_requests=1, max_cached=400, max_query=1))
    request, layer = case.requests[0], case.layer
    backend = create(case, **chosen)
    kv_cache = case.filled_cache(backend)
    own = request.seq_len - 1
    shifts = {shift_of(case, chosen, head) for head in range(layer.num_heads)}
    unseen = [
        page
        for index, page in enumerate(request.block_ids)
        if not any(sees(chosen, own, index * 8, shift) for shift in shifts)
    ]
    assert len(unseen) > len(request.block_ids) // 2
    kv_cache[torch.tensor(unseen)] = torch.nan
    torch.testing.assert_close(case.run(backend, kv_cache).double(), expected(case, chosen), atol=5e-6, rtol=5e-6)


def test_heads_are_counted_over_all_ranks():
    """The second rank's heads have the pattern that they would have in one process."""
    chosen = BlockSparseOptions(local_blocks=1, vert_stride=16, heads="sliding")
    whole = head_shifts(AttentionLayer(0, 8, 4, 16, 1.0), chosen)
    halves = [
        head_shifts(AttentionLayer(0, 4, 2, 16, 1.0, first_head=first, total_heads=8), chosen) for first in (0, 4)
    ]
    assert halves[0] + halves[1] == whole == (0, 2, 4, 6, 8, 10, 12, 14)


block_patterns = st.builds(BlockPattern, st.just(16), st.integers(1, 5), st.integers(0, 7), st.integers(0, 3))
head_groups = st.tuples(st.integers(1, 4), st.integers(1, 3)).flatmap(
    lambda heads: st.tuples(
        st.just(heads[0]), st.lists(st.integers(0, 9), min_size=heads[0] * heads[1], max_size=heads[0] * heads[1])
    )
)


@given(block_patterns, head_groups, st.lists(st.integers(0, 60), min_size=1, max_size=6))
def test_listed_blocks_are_those_that_are_seen(pattern, heads, query_blocks):
    num_kv_heads, shifts = heads
    visible = VisibleBlocks(pattern, tuple(shifts), num_kv_heads)
    lists = visible.lists(np.array(query_blocks))
    padded = lists.padded(np.arange(len(query_blocks)))
    for index, query_block in enumerate(query_blocks):
        for head, group in enumerate(visible.group_shifts):
            head = min(head, lists.counts.shape[1] - 1)
            seen = [
                block
                for block in range(query_block + 1)
                if any(pattern.sees(np.array(query_block), np.array(block), shift) for shift in group)
            ]
            begin, count = lists.begins[index, head], lists.counts[index, head]
            assert lists.blocks[begin : begin + count].tolist() == seen
            assert padded[index, head].tolist() == seen + [-1] * (padded.shape[2] - len(seen))


@given(st.integers(0, 2**32 - 1), shapes, st.sampled_from([16, 32]), st.sampled_from([1, 4, 16]))
@settings(max_examples=60, deadline=None)
def test_items_of_gpus_are_those_of_a_loop_over_tokens(seed, shape, sparse_block, tokens_per_tile):
    batch = random_case(seed, shape).batch()
    items, blocks = create_items(batch, sparse_block, tokens_per_tile, table_width=7)
    expected = []
    for request, seq_len in enumerate(batch.seq_lens.tolist()):
        start, end = batch.query_start[request : request + 2].tolist()
        cached = seq_len - (end - start)
        for position in range(cached, seq_len):
            is_full = position == cached or expected[-1][0][1] == tokens_per_tile
            if is_full or position % sparse_block == 0:
                row = start + position - cached
                expected.append(([row, 0, request * 7, 0, position, cached, start, -1], position // sparse_block))
            expected[-1][0][1] += 1
            expected[-1][0][4] += 1
    assert [(item, block) for item, block in zip(items.tolist(), blocks.tolist(), strict=True)] == expected


@given(st.integers(0, 2**32 - 1), shapes)
@settings(max_examples=40, deadline=None)
def test_units_cover_the_step_within_blocks(seed, shape):
    batch = random_case(seed, shape).batch()
    units = create_units(batch, 16)
    assert (units.position // 16 == (units.position + units.count - 1) // 16).all()
    tokens = [
        t for first, count in zip(units.first_token, units.count, strict=True) for t in range(first, first + count)
    ]
    assert tokens == list(range(int(batch.query_start[-1])))


def check(environment=None, chosen=None, **changes):
    need = replace(AttentionNeed("cpu", "float32", 16, frozenset({64})), **changes)
    return reasons_against(
        BlockSparseBackend,
        need,
        BlockSparseOptions(**(chosen or {"local_blocks": 4})),
        environment or Environment("cpu", 2, 2**33),
    )


def test_auto_never_takes_it():
    [reason] = check(chosen={"vert_stride": 4})
    assert "set attention.local_blocks" in reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sliding_window": True}, "has no sliding window; choose another backend"),
        ({"trees": True}, "has no tree masks; choose another backend, or auto."),
        ({"block_size": 48}, "multiple of cache.block_size, 48, not 64."),
    ],
)
def test_refusals_say_what_is_missing(changes, reason):
    [found] = check(**changes)
    assert reason in found


def test_on_gpus_blocks_are_powers_of_two():
    pytest.importorskip("triton")
    environment = Environment("cuda", 8, 2**36, devices=(DeviceInfo("H200", 2**37, (9, 0)),))
    [reason] = check(environment, {"local_blocks": 4, "sparse_block_size": 48}, device_type="cuda")
    assert "a power of two from 16" in reason


def test_pages_that_do_not_fit_the_blocks_are_refused():
    case = random_case(0, CaseShape(block_size=32))
    with pytest.raises(ConfigError, match=r"multiple of cache\.block_size"):
        create(case, local_blocks=1, sparse_block_size=16)


def test_on_cpus_the_host_rotates():
    """And on GPUs the backend does."""
    case = random_case(0, CaseShape(block_size=16, head_size=16))
    options = BlockSparseOptions(local_blocks=1)
    assert not isinstance(BlockSparseBackend(options, case.setup), RotatesAndWrites)
    on_gpu = BlockSparseBackend.__new__(BlockSparseBackend, options, replace(case.setup, device="cuda:0"))
    assert isinstance(on_gpu, RotatesAndWrites)
