"""`block_sparse` through the kernels for GPUs, in Triton's interpreter; see paged_triton_cases.py.

The CPU side, which is measured against a dense mask, is the oracle.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.attention_backends.block_sparse.backend import BlockSparseBackend, RotatingBlockSparse
from dovetail.attention_backends.block_sparse.pattern import BlockSparseOptions
from dovetail.nn.operators import torch_operators
from dovetail.testing.attention_cases import CaseShape, random_case
from dovetail.testing.kernel_checks import checked_kernels

TOLERANCE = {"bfloat16": 1.6e-2, "float16": 2e-3, "float32": 5e-6}


@pytest.fixture(autouse=True, scope="module")
def checks() -> Iterator[None]:
    """No launch of this module reads or writes what it must not."""
    with checked_kernels():
        yield


class InterpretedBackend(RotatingBlockSparse):
    """The kernels for GPUs, on the CPU."""


patterns = st.builds(
    BlockSparseOptions,
    local_blocks=st.integers(1, 3),
    vert_stride=st.one_of(st.none(), st.integers(1, 6)),
    sink_blocks=st.integers(0, 2),
    sparse_block_size=st.sampled_from([16, 32]),
    heads=st.sampled_from(["same", "sliding", "sliding_groups"]),
)
shapes = st.builds(
    CaseShape,
    dtype=st.sampled_from(sorted(TOLERANCE)),
    block_size=st.just(16),
    head_size=st.sampled_from([16, 24]),
    max_requests=st.integers(1, 3),
    max_cached=st.sampled_from([60, 200]),
    max_query=st.sampled_from([1, 5, 40]),
)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32 - 1), shapes, patterns, st.sampled_from([0, 16]))
def test_equals_the_cpu_side(seed, shape, options, padding):
    case = random_case(seed, shape)
    outputs = [
        case.run_from_scratch(backend(options, case.setup), padding)
        for backend in (InterpretedBackend, BlockSparseBackend)
    ]
    tolerance = TOLERANCE[shape.dtype]
    torch.testing.assert_close(*outputs, atol=tolerance, rtol=tolerance)


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**32 - 1), shapes, patterns, st.sampled_from([2, 10, 16]))
def test_rotating_while_writing_is_rotating_first(seed, shape, options, rotary):
    case = random_case(seed, shape)
    query, key, value = case.inputs()
    random = torch.rand(len(query), 2, 1, rotary, generator=torch.Generator().manual_seed(seed))
    cos, sin = random.to(query.dtype).unbind(1)
    rotated = case.with_inputs(*(torch_operators().rotate(heads, cos, sin) for heads in (query, key)))
    backend = InterpretedBackend(options, case.setup)
    expected = rotated.run_from_scratch(backend)
    kv_cache = case.filled_cache(backend)
    backend.plan(case.batch())
    assert torch.equal(backend.rotate_and_forward(case.layer, query, key, value, cos, sin, kv_cache), expected)


def test_pages_outside_of_the_pattern_are_not_read():
    options = BlockSparseOptions(local_blocks=1, sink_blocks=1, sparse_block_size=16)
    shape = CaseShape(block_size=16, head_size=16, max_requests=1, max_cached=300, max_query=1)
    cases = (random_case(seed, shape) for seed in range(99))
    case = next(case for case in cases if case.requests[0].seq_len > 48 and case.requests[0].query_len == 1)
    backend = InterpretedBackend(options, case.setup)
    kv_cache = case.filled_cache(backend)
    expected = case.run(backend, kv_cache)
    kv_cache[torch.tensor(case.requests[0].block_ids[1:-1])] = torch.nan
    assert torch.equal(case.run(backend, kv_cache), expected)
