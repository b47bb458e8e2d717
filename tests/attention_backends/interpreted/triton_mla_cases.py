"""`triton_mla` in Triton's interpreter, on the CPU, with every address that a program touches checked: what
tests/attention_backends/test_triton_mla.py runs.

    TRITON_INTERPRET=1 python -m pytest tests/attention_backends/interpreted/triton_mla_cases.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import triton.runtime.interpreter as interpreter
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.attention_backends.reference import ReferenceBackend
from dovetail.attention_backends.triton_mla.backend import TritonMLABackend
from dovetail.contracts.attention import AttentionBatch, AttentionNeed
from dovetail.testing.attention_cases import AttentionCase, CaseShape
from dovetail.testing.attention_suite import AttentionBackendSuite
from dovetail.testing.kernel_checks import CheckedLaunches, checked_kernels
from dovetail.testing.latent_cases import LatentCase, random_latent_case

TOLERANCE = {"bfloat16": 1.6e-2, "float16": 2e-3, "float32": 5e-6}
"""Two roundings of numbers near 1, which the reference makes at other places."""


@pytest.fixture(autouse=True, scope="module")
def checks() -> Iterator[CheckedLaunches]:
    """No launch of this module reads or writes what it must not."""
    with checked_kernels() as seen:
        yield seen


class InterpretedBackend(TritonMLABackend):
    """The backend itself; only what it says of machines is the interpreter's."""

    capabilities = replace(TritonMLABackend.capabilities, device_types=frozenset({"cpu"}))


class InterpretedWithoutFloat16(InterpretedBackend):
    capabilities = replace(InterpretedBackend.capabilities, dtypes=frozenset({"bfloat16", "float32"}))


def create(case: AttentionCase) -> InterpretedBackend:
    return InterpretedBackend(InterpretedBackend.Options(), case.setup)


def assert_same(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 5e-6) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)


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


def filled(case: LatentCase, backend: InterpretedBackend) -> torch.Tensor:
    """Pages that hold the past, put there without the kernels, which would take a minute; all else is NaN."""
    kv_cache = case.make_cache(backend).fill_(torch.nan)
    for request in case.requests:
        for place, vector in enumerate(request.keys[: request.num_cached, 0]):
            page, offset = divmod(place, case.setup.block_size)
            kv_cache[request.block_ids[page], offset] = vector
    return kv_cache


def run(case: LatentCase, backend: InterpretedBackend | None = None) -> torch.Tensor:
    """One step over pages that are `filled`."""
    backend = backend or create(case)
    return case.run(backend, filled(case, backend))


class TestTritonMLA(AttentionBackendSuite):
    """Every case has latent vectors, since the backend serves nothing else."""

    plugin = InterpretedWithoutFloat16
    num_cases: ClassVar[int] = 1
    latent_sizes: ClassVar[Sequence[tuple[int, int]]] = ((16, 8), (32, 16), (24, 8))

    def case(self, seed: int, dtype: str | None = None, feature: str = "plain", **changes: Any) -> AttentionCase:
        return super().case(seed, dtype, "latents+trees" if "trees" in feature else "latents", **changes)

    def need(self, **changes: Any) -> AttentionNeed:
        return super().need(**{"latents": True, **changes})

    @pytest.mark.usefixtures("matrix_unit")
    @pytest.mark.parametrize("feature", ["latents"])
    def test_batch_invariance(self, feature: str) -> None:
        super().test_batch_invariance(feature)


shapes = st.builds(
    CaseShape,
    dtype=st.sampled_from(sorted(TOLERANCE)),
    block_size=st.sampled_from([1, 16, 48, 64]),
    max_requests=st.just(3),
    max_query=st.sampled_from([1, 6, 40]),
    has_trees=st.booleans(),
)
sizes = st.sampled_from([(16, 8), (32, 16), (24, 10), (64, 64), (40, 3)])


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32 - 1), shapes, sizes, st.sampled_from([0, 16]))
def test_equals_reference(seed, shape, sizes, padding):
    """Prefill, chunk, decode and verify rows in one batch."""
    case = random_latent_case(seed, shape, *sizes)
    expected = case.run_from_scratch(ReferenceBackend(ReferenceBackend.Options(), case.setup))
    assert_same(case.run_from_scratch(create(case), padding), expected, TOLERANCE[shape.dtype])


def with_heads(case: LatentCase, num_heads: int) -> LatentCase:
    """The case with the heads of its layer again and again, up to `num_heads`."""
    heads = np.arange(num_heads) % case.layer.num_heads
    layer = replace(case.layer, num_heads=num_heads)
    requests = tuple(replace(request, query=request.query[:, heads]) for request in case.requests)
    setup = replace(case.setup, layers=(layer,))
    return replace(case, setup=setup, requests=requests, key_up=case.key_up[heads], value_up=case.value_up[heads])


@pytest.mark.parametrize("num_heads", [16, 40, 128])
def test_heads_of_one_tile_or_of_several(num_heads):
    """40 heads are no power of two: a tile has 20 of them, in 32 rows; 128 are four tiles of 32."""
    shape = CaseShape(dtype="bfloat16", block_size=16, lengths=((1, 20), (3, 5)))
    case = with_heads(random_latent_case(1, shape, 16, 8), num_heads)
    assert_same(case.run_from_scratch(create(case)), case.expected(), TOLERANCE["bfloat16"])


@pytest.mark.parametrize(("latent_size", "rotary_size"), [(512, 64), (256, 32)])
def test_vectors_of_known_models(latent_size, rotary_size):
    """DeepSeek's and MiniCPM3's."""
    shape = CaseShape(block_size=16, lengths=((1, 33), (2, 9)))
    case = random_latent_case(2, shape, latent_size, rotary_size)
    assert_same(case.run_from_scratch(create(case)), case.expected(), 2e-5)


@pytest.mark.parametrize("lengths", [((1, 900),), ((7, 600), (1, 300), (40, 280))])
def test_long_keys_are_cut_and_put_together(lengths):
    case = random_latent_case(2, CaseShape(block_size=16, lengths=lengths), 16, 8)
    assert_same(run(case), case.expected())


def test_layers_may_differ_in_heads():
    """One plan serves them all."""
    case = random_latent_case(11, CaseShape(max_requests=3), 16, 8)
    other = with_heads(case, 2 * case.layer.num_heads)
    more = replace(other.layer, layer_id=case.layer.layer_id + 1)
    setup = replace(case.setup, layers=(case.layer, more))
    cases = (replace(case, setup=setup), replace(other, setup=setup, layer_index=1))
    backend = create(cases[0])
    caches = [filled(each, backend) for each in cases]
    backend.plan(case.batch())
    for each, kv_cache in zip(cases, caches, strict=True):
        assert_same(each.forward(backend, *each.inputs(), kv_cache), each.expected())


def filled_up(case: LatentCase) -> tuple[AttentionBatch, np.ndarray]:
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


def test_tokens_that_fill_up_a_graph_reach_no_row(checks):
    """A former owner's NaN lies where they stand in a sequence."""
    case = random_latent_case(5, CaseShape(block_size=16, max_query=6, lengths=((6, 40), (1, 300), (3, 20))), 16, 8)
    case = replace(case, setup=replace(case.setup, max_num_seqs=4))
    backend = create(case)
    kv_cache = filled(case, backend)
    checks.dumps.append(kv_cache[0])
    batch, places = filled_up(case)
    query, latent, _ = case.inputs()
    queries, latents = (torch.ones(len(batch.slot_mapping), *tensor.shape[1:]) for tensor in (query, latent))
    queries[places], latents[places] = query, latent
    backend.plan(batch)
    output = backend.latent_forward(case.layer, queries, latents[:, 0], kv_cache)
    assert_same(output[places], case.expected())
    assert output.isfinite().all()


@pytest.mark.usefixtures("matrix_unit")
def test_bits_stay_whatever_is_computed_with_a_row():
    """Alone, with others, in chunks, and with keys cut into runs or in one piece."""
    case = random_latent_case(3, CaseShape(block_size=16, lengths=((1, 520), (6, 509))), 16, 8)
    case = replace(case, setup=replace(case.setup, batch_invariant=True))
    together = run(case)
    assert_same(together, case.expected())
    start = 0
    for request in case.requests:
        for skipped in {0, request.query_len // 2}:
            part = replace(case, requests=(replace(request, query=request.query[skipped:], num_shared=0),))
            backend = create(part)
            backend._passes._most_extra = {"short": 0, "long": 0}  # on a device with few processors nothing is cut
            rows = together[start + skipped : start + request.query_len]
            assert torch.equal(run(part, backend), rows)
        start += request.query_len


def test_shared_keys_change_nothing():
    """Six requests behind one prefix, of two heads, so that several fit into a tile."""
    keys, shape = 544, CaseShape(block_size=32, lengths=tuple((1, 544 + 17 * index) for index in range(6)))
    case = with_heads(random_latent_case(1, shape, 16, 8), 2)
    first, next_block, requests = case.requests[0], case.num_blocks, [case.requests[0]]
    for request in case.requests[1:]:
        own = len(request.block_ids) - keys // 32
        ids = (*first.block_ids[: keys // 32], *range(next_block, next_block + own))
        next_block += own
        vectors = torch.cat((first.keys[:keys], request.keys[keys:]))
        requests.append(replace(request, keys=vectors, block_ids=ids, num_shared=keys))
    case = replace(case, requests=tuple(requests), num_blocks=next_block + 1)
    backend = create(case)
    kv_cache = filled(case, backend)
    backend.plan(case.batch())
    [items] = [found.arrays.items for passes in backend._passes._passes.values() for found in passes]
    assert (items[:, 6] < 0).any(), "some item is of several requests"
    assert_same(case.forward(backend, *case.inputs(), kv_cache), case.expected())
