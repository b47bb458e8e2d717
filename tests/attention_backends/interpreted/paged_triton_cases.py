"""`paged_triton` in Triton's interpreter, on the CPU, with every address that a program touches checked: what
tests/attention_backends/test_paged_triton.py runs.

    TRITON_INTERPRET=1 python -m pytest tests/attention_backends/interpreted/paged_triton_cases.py
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
import triton.runtime.interpreter as interpreter
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.attention_backends.paged_triton.backend import PagedTritonBackend
from dovetail.attention_backends.paged_triton.plan import split_rows
from dovetail.attention_backends.reference import ReferenceBackend
from dovetail.contracts.attention import AttentionBackend, AttentionBatch
from dovetail.contracts.errors import ConfigError
from dovetail.nn.operators import torch_operators
from dovetail.testing.attention_cases import AttentionCase, CaseRequest, CaseShape, as_cached, random_case, random_tree
from dovetail.testing.attention_suite import AttentionBackendSuite
from dovetail.testing.kernel_checks import CheckedLaunches, checked_kernels

DTYPES = ("bfloat16", "float16", "float32")
TOLERANCE = {"bfloat16": 1.6e-2, "float16": 2e-3, "float32": 5e-6}
"""Two roundings of numbers near 1, which the reference makes at other places."""


@pytest.fixture(autouse=True, scope="module")
def checks() -> Iterator[CheckedLaunches]:
    """No launch of this module reads or writes what it must not."""
    with checked_kernels() as seen:
        yield seen


class InterpretedBackend(PagedTritonBackend):
    """The backend itself; only what it says of machines is the interpreter's."""

    capabilities = replace(PagedTritonBackend.capabilities, device_types=frozenset({"cpu"}))


def create(case: AttentionCase) -> InterpretedBackend:
    return InterpretedBackend(InterpretedBackend.Options(), case.setup)


def reference(case: AttentionCase) -> AttentionBackend:
    return ReferenceBackend(ReferenceBackend.Options(), case.setup)


def assert_same(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 5e-6) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)


class InterpretedWithoutFloat16(InterpretedBackend):
    capabilities = replace(InterpretedBackend.capabilities, dtypes=frozenset({"bfloat16", "float32"}))


@pytest.fixture
def matrix_unit(monkeypatch):
    """Products whose elements depend on their row and column alone, as those of a GPU's matrix units do; BLAS, which
    the interpreter calls, rounds a row by its place in the matrix."""

    def create_dot(self, a, b, d, *_):
        product = d.data.copy()
        for k in range(a.data.shape[1]):
            product += a.data[:, k : k + 1].astype(product.dtype) * b.data[k : k + 1].astype(product.dtype)
        return interpreter.TensorHandle(product, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


class TestPagedTriton(AttentionBackendSuite):
    """In two dtypes and one case each: the interpreter is slow. `test_equals_reference` below draws more of both."""

    plugin = InterpretedWithoutFloat16
    num_cases: ClassVar[int] = 1

    @pytest.mark.usefixtures("matrix_unit")
    @pytest.mark.parametrize("feature", ["plain"])
    def test_batch_invariance(self, feature: str) -> None:
        super().test_batch_invariance(feature)


shapes = st.builds(
    CaseShape,
    dtype=st.sampled_from(DTYPES),
    block_size=st.sampled_from([16, 32, 64, 128]),
    head_size=st.sampled_from([32, 80, 112, 128]),
    max_requests=st.just(2),
    max_query=st.sampled_from([1, 6, 40]),
    has_window=st.booleans(),
    has_soft_cap=st.booleans(),
    has_alibi=st.booleans(),
    has_trees=st.booleans(),
    has_sinks=st.booleans(),
)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32 - 1), shapes, st.sampled_from([0, 16]))
def test_equals_reference(seed, shape, padding):
    case = random_case(seed, shape)
    expected = case.run_from_scratch(reference(case))
    assert_same(case.run_from_scratch(create(case), padding), expected, TOLERANCE[shape.dtype])


def rotated_and_written(
    case: AttentionCase, rotary: int, *, fused: bool, backend: AttentionBackend | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The step's result and the bytes of its pages, rotated by the backend or by the default operators before it."""
    backend = backend or create(case)
    kv_cache = case.filled_cache(backend)
    backend.plan(case.batch())
    query, key, value = case.inputs()
    random = torch.rand(len(query), 2, 1, rotary, generator=torch.Generator().manual_seed(1)) * 2 - 1
    cos, sin = random.to(query.dtype).unbind(1)
    if fused:
        output = backend.rotate_and_forward(case.layer, query, key, value, cos, sin, kv_cache)
    else:
        rotate = torch_operators().rotate
        output = backend.forward(case.layer, rotate(query, cos, sin), rotate(key, cos, sin), value, kv_cache)
    return output, kv_cache.view(torch.uint8)


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**32 - 1), shapes, st.sampled_from([1, 2, 3, 32]))
def test_rotating_while_writing_equals_reference(seed, shape, divisor):
    case = random_case(seed, replace(shape, max_cached=20))
    rotary = shape.head_size // divisor // 2 * 2
    output, _ = rotated_and_written(case, max(2, rotary), fused=True)
    expected, _ = rotated_and_written(case, max(2, rotary), fused=False, backend=reference(case))
    assert_same(output, expected, TOLERANCE[shape.dtype])


KV_DTYPES = ("float32", "float16", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")
# Each dtype of keys with each of pages, and each of both with all of a head or the beginning of it.
ROTATED = [
    pytest.param(dtype, kv_dtype, rotary, id=f"{rotary}-{dtype}-{kv_dtype}")
    for row, dtype in enumerate(DTYPES)
    for column, kv_dtype in enumerate(KV_DTYPES)
    for rotary in [(80, 10)[(row + column) % 2]]
]


@pytest.mark.parametrize(("dtype", "kv_dtype", "rotary"), ROTATED)
def test_rotating_while_writing_leaves_the_bits_of_rotating_first(dtype, kv_dtype, rotary):
    """In the pages and in the result."""
    case = random_case(3, CaseShape(dtype=dtype, head_size=80, max_requests=1, max_cached=8, max_query=6))
    layer = replace(case.layer, key_scale=2.0**-3, value_scale=2.0**-2)
    case = replace(case, setup=replace(case.setup, layers=(layer,), spec=replace(case.setup.spec, dtype=kv_dtype)))
    output, pages = rotated_and_written(case, rotary, fused=True)
    expected, expected_pages = rotated_and_written(case, rotary, fused=False)
    assert torch.equal(pages, expected_pages)
    assert torch.equal(output.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (40, 5), (20, 20)])
def test_heads_that_fill_no_program_or_several(num_heads, num_kv_heads):
    """A program writes 16 heads of this size, and turns as many."""
    setup = random_case(0, CaseShape(head_size=128)).setup
    layer = replace(setup.layers[0], num_heads=num_heads, num_kv_heads=num_kv_heads)
    setup = replace(setup, layers=(layer,), spec=replace(setup.spec, num_kv_heads=num_kv_heads))
    shapes = (2, num_heads, 128), (3, num_kv_heads, 128), (3, num_kv_heads, 128)
    query, keys, values = (torch.rand(shape, generator=torch.Generator().manual_seed(2)) for shape in shapes)
    case = AttentionCase(setup, 4, (CaseRequest(query, keys, values, (3, 1, 2), 0, None),))
    results = [rotated_and_written(case, 96, fused=fused) for fused in (True, False)]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_angles_that_do_not_fit_are_refused():
    case = random_case(0, CaseShape(head_size=16, max_requests=1, max_cached=4))
    with pytest.raises(ValueError, match=r"angles \[\d+, 1, 18\] for queries \[\d+, \d+, 16\]"):
        rotated_and_written(case, 18, fused=True)


@pytest.mark.parametrize(
    ("max_query", "has_window", "has_sinks"), [(1, False, True), (1, False, False), (7, True, True), (40, False, False)]
)
def test_long_keys_are_cut_and_put_together(max_query, has_window, has_sinks):
    """A sink joins the sum of weights once, whatever the number of parts."""
    shape = CaseShape(
        max_requests=2, max_query=max_query, max_cached=800, head_size=16, has_window=has_window, has_sinks=has_sinks
    )
    case = random_case(2, replace(shape, has_trees=True))
    assert_same(case.run_from_scratch(create(case)), case.expected())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_pages_hold_scaled_numbers(kv_dtype, dtype):
    case = random_case(4, CaseShape(dtype=dtype, head_size=32, max_requests=2))
    scaled = replace(case.layer, key_scale=2.0**-3, value_scale=2.0**-2)
    held = tuple(
        replace(
            request,
            keys=held_by(kv_dtype, request.keys, scaled.key_scale),
            values=held_by(kv_dtype, request.values, scaled.value_scale),
        )
        for request in case.requests
    )
    setup = replace(case.setup, layers=(scaled,), spec=replace(case.setup.spec, dtype=kv_dtype))
    case = replace(case, setup=setup, requests=held)
    assert_same(case.run_from_scratch(create(case)), case.expected(), TOLERANCE[dtype])


def held_by(kv_dtype: str, vectors: torch.Tensor, scale: float) -> torch.Tensor:
    """The nearest multiples of `scale` (a power of 2) that pages of `kv_dtype` hold."""
    return as_cached(vectors / scale, kv_dtype) * scale


def test_what_fp8_cannot_hold_is_clamped():
    case = random_case(6, CaseShape(head_size=32, max_requests=1, max_cached=4, max_query=4))
    request = case.requests[0]
    huge, largest = (replace(request, values=torch.full_like(request.values, x)) for x in (1e6, 448.0))
    setup = replace(case.setup, spec=replace(case.setup.spec, dtype="float8_e4m3fn"))
    output = replace(case, setup=setup, requests=(huge,))
    assert_same(output.run_from_scratch(create(output)), torch.full(largest.query.shape, 448.0))


def test_layers_of_one_group_may_differ():
    """In query heads, window and soft cap: the pages are kept for the one that sees most."""
    case = random_case(11, CaseShape(max_requests=3))
    wide = case.layer
    more_heads = replace(wide, layer_id=97, num_heads=2 * wide.num_heads)
    layers = (wide, replace(wide, layer_id=98, window=5), replace(wide, layer_id=99, soft_cap=1.5), more_heads)
    case = replace(case, setup=replace(case.setup, layers=layers))
    backend = create(case)
    kv_cache = case.filled_cache(backend)
    backend.plan(case.batch())
    for layer in layers:
        query, key, value = case.inputs()
        requests = case.requests
        if layer is more_heads:
            query = torch.cat((query, query), dim=1)
            requests = tuple(replace(r, query=torch.cat((r.query, r.query), dim=1)) for r in requests)
        alone = replace(case, requests=requests, setup=replace(case.setup, layers=(layer,)))
        assert_same(backend.forward(layer, query, key, value, kv_cache), alone.expected())


def test_what_is_not_a_number_shows():
    case = random_case(2, CaseShape(max_requests=1, head_size=16))
    case.requests[0].keys[0] = torch.nan
    assert torch.isnan(case.run_from_scratch(create(case))).all()


def filled_up(case: AttentionCase) -> tuple[AttentionBatch, np.ndarray]:
    """The step as a graph replays it, with one request that does not exist, and the places of its real tokens."""
    batch = case.batch()
    length, counts = batch.max_query_len, np.diff(batch.query_start)
    num_requests = len(counts) + 1
    places = np.concatenate([index * length + np.arange(count) for index, count in enumerate(counts)])
    slots = np.zeros(num_requests * length, dtype=np.int64)
    slots[places] = batch.slot_mapping
    seq_lens = np.append(batch.seq_lens + (length - counts), length).astype(np.int32)
    filled = replace(
        batch,
        query_start=np.arange(num_requests + 1, dtype=np.int32) * np.int32(length),
        seq_lens=seq_lens,
        block_table=np.concatenate((batch.block_table, np.zeros_like(batch.block_table[:1]))),
        slot_mapping=slots,
        max_seq_len=int(seq_lens.max()),
        is_for_graph=True,
    )
    return filled, places


@pytest.mark.parametrize("is_filled", [False, True])
@pytest.mark.parametrize(("max_query", "window"), [(6, None), (6, 2), (40, None)])
def test_nothing_behind_a_sequence_reaches_its_rows(max_query, window, is_filled, checks):
    """A former owner's NaN in a request's last page, in block 0 and in pages of others: zeros as weights do not hide
    it. Tokens that fill up a graph stand at such places."""
    case = random_case(5, CaseShape(block_size=16, head_size=16, max_requests=4, max_cached=40, max_query=max_query))
    layer = replace(case.layer, window=window)
    case = replace(case, setup=replace(case.setup, layers=(layer,), max_num_seqs=5))
    assert len({request.query_len for request in case.requests}) > 1
    backend = create(case)
    kv_cache = case.filled_cache(backend)
    pages = kv_cache.view(case.num_blocks, layer.num_kv_heads, 2, 16, 16)
    for request in case.requests:
        pages[request.block_ids[-1], :, :, (request.seq_len - 1) % 16 + 1 :] = torch.nan
    if not is_filled:
        assert_same(case.run(backend, kv_cache), case.expected())
        return
    checks.dumps.append(kv_cache[0])
    batch, places = filled_up(case)
    inputs = [torch.ones(len(batch.slot_mapping), *tensor.shape[1:]) for tensor in case.inputs()]
    for filled, real in zip(inputs, case.inputs(), strict=True):
        filled[places] = real
    backend.plan(batch)
    output = backend.forward(layer, *inputs, kv_cache)
    assert_same(output[places], case.expected())
    assert output.isfinite().all()


# --- rows whose bits do not depend on others ---------------------------------------------------------------


@pytest.mark.usefixtures("matrix_unit")
@pytest.mark.parametrize(
    ("lengths", "has_window", "has_sinks"),
    [(((1, 520), (6, 509)), False, True), (((6, 520), (1, 514)), True, False)],
)
def test_bits_stay_whatever_is_computed_with_a_row(lengths, has_window, has_sinks):
    """Alone, with others, in chunks, and with keys cut or in one piece: this one processor's share of items cuts some
    tiles and leaves others."""
    shape = CaseShape(
        head_size=16, block_size=16, lengths=lengths, has_window=has_window, has_sinks=has_sinks, max_requests=3
    )
    cases = (random_case(seed, shape) for seed in itertools.count())
    case = next(case for case in cases if (case.layer.num_heads, case.layer.num_kv_heads) == (2, 1))
    case = replace(case, setup=replace(case.setup, batch_invariant=True))
    together = case.run_from_scratch(create(case))
    assert_same(together, case.expected())
    start = 0
    for request in case.requests:
        for skipped in {0, request.query_len // 2}:
            alone = replace(request, query=request.query[skipped:], num_shared=0)
            part = replace(case, requests=(alone,))
            backend = create(part)
            backend._passes._most_extra = {"short": 0, "long": 0}  # on a device with few processors nothing is cut
            rows = together[start + skipped : start + request.query_len]
            assert torch.equal(part.run_from_scratch(backend), rows)
        start += request.query_len


# --- requests behind one prefix -----------------------------------------------------------------------------


def behind_one_prefix(seed: int, shape: CaseShape, counts: list[int], num_keys: int) -> AttentionCase:
    """A step of requests with `counts` query tokens each, of which all but the last share `num_keys` keys."""
    lengths = tuple((count, num_keys + 17 * index) for index, count in enumerate(counts))
    shape = replace(shape, block_size=32, max_requests=len(counts), lengths=lengths)
    cases = (random_case(seed, shape) for seed in itertools.count(seed))
    # Of one key head, for the interpreter's sake; a tile of 16 rows holds four tokens.
    case = next(case for case in cases if (case.layer.num_heads, case.layer.num_kv_heads) == (4, 1))
    first = case.requests[0]
    next_block = case.num_blocks
    requests = [first]
    for request in case.requests[1:]:
        shared = num_keys if request is not case.requests[-1] else 0
        own = len(request.block_ids) - shared // 32
        ids = (*first.block_ids[: shared // 32], *range(next_block, next_block + own))
        next_block += own
        keys, values = (
            torch.cat((mine[:shared], theirs[shared:]))
            for mine, theirs in ((first.keys, request.keys), (first.values, request.values))
        )
        requests.append(replace(request, keys=keys, values=values, block_ids=ids, num_shared=shared))
    return replace(case, requests=tuple(requests), num_blocks=next_block + 1)


SHARING = [([1] * 6, CaseShape(has_sinks=True)), ([2, 1, 3, 1, 2], CaseShape(has_alibi=True))]


@pytest.mark.parametrize(("counts", "shape"), SHARING)
@pytest.mark.parametrize("is_for_graph", [False, True])
def test_shared_keys_change_nothing(counts, shape, is_for_graph, checks):
    case = behind_one_prefix(1, replace(shape, head_size=16), counts, 544)
    backend = create(case)
    [group] = backend._passes._find_groups(case.batch(), split_rows(case.batch(), 32)[0])
    assert len(group[0].members) == len(counts) - 1
    kv_cache = case.filled_cache(backend)
    if not is_for_graph:
        assert_same(case.run(backend, kv_cache), case.expected())
        return
    case = replace(case, setup=replace(case.setup, max_num_seqs=len(counts) + 1))
    backend = create(case)
    checks.dumps.append(kv_cache[0])
    batch, places = filled_up(case)
    inputs = [torch.ones(len(batch.slot_mapping), *tensor.shape[1:]) for tensor in case.inputs()]
    for filled, real in zip(inputs, case.inputs(), strict=True):
        filled[places] = real
    backend.plan(batch)
    assert_same(backend.forward(case.layer, *inputs, kv_cache)[places], case.expected())


@settings(max_examples=5, deadline=None)
@given(
    st.integers(0, 2**31),
    st.lists(st.integers(1, 6), min_size=4, max_size=9),
    st.sampled_from([512, 640]),
    st.booleans(),
    st.booleans(),
)
def test_any_sharing_equals_reference(seed, counts, num_keys, has_soft_cap, has_trees):
    shape = CaseShape(head_size=16, has_soft_cap=has_soft_cap, has_trees=has_trees)
    case = behind_one_prefix(seed, shape, counts, num_keys)
    if has_trees:
        trees = np.random.default_rng(seed)
        requests = tuple(
            replace(request, tree=random_tree(trees, request.query_len) if request.query_len > 1 else None)
            for request in case.requests
        )
        case = replace(case, requests=requests)
    assert_same(case.run_from_scratch(create(case)), case.run_from_scratch(reference(case)))


def test_a_step_without_rows():
    case = random_case(0, CaseShape())
    backend = create(case)
    empty = np.zeros(0, dtype=np.int32)
    table = np.zeros((0, 4), dtype=np.int32)
    backend.plan(AttentionBatch(np.zeros(1, dtype=np.int32), empty, table, empty.astype(np.int64), 0, 0))
    output = backend.forward(case.layer, *(tensor[:0] for tensor in case.inputs()), case.make_cache(backend))
    assert output.shape == (0, case.layer.num_heads, case.layer.head_size)


def test_buffers_stay_where_they_are():
    """What a graph has captured: a larger step than the setup's is refused, not served from new memory."""
    case = random_case(0, CaseShape())
    small = replace(case, setup=replace(case.setup, max_num_batched_tokens=1))
    backend = create(small)
    with pytest.raises(ConfigError, match="set up for 1 query tokens"):
        backend.plan(random_case(3, CaseShape()).batch())
