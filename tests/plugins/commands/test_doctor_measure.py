"""What `dovetail doctor` measures, without a word on how fast it should be."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.nn import native
from dovetail.plugins.commands.doctor import bandwidth
from dovetail.plugins.commands.doctor.bandwidth import (
    SOURCE,
    NativeReader,
    Reader,
    TorchReader,
    measure_bandwidth,
    sizes_to_read,
    thread_counts,
)
from dovetail.plugins.commands.doctor.facts import Cache
from dovetail.plugins.commands.doctor.products import measure_products

CACHES = (Cache(1, 32 << 10, 8), Cache(2, 512 << 10, 8), Cache(3, 32 << 20, 1))
needs_compiler = pytest.mark.skipif(bool(native.reasons_against(SOURCE)), reason="no C compiler")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "_SECONDS", 0.001)
    monkeypatch.setattr(bandwidth, "_TRIALS", 1)


@given(st.integers(1, 512))
def test_thread_counts_go_from_one_to_all(most: int) -> None:
    counts = thread_counts(most)
    assert counts[0] == 1
    assert counts[-1] == most
    assert list(counts) == sorted(set(counts))
    assert len(counts) <= 4


@given(st.integers(1 << 22, 1 << 36), st.integers(1, 64))
def test_sizes_fit_caches_and_leave_memory_free(available: int, threads: int) -> None:
    sizes = sizes_to_read(CACHES, available, threads)
    assert max(size.num_bytes for size in sizes) <= max(available // 4, 1 << 18)
    assert sizes[-1].where == "memory"
    for size in sizes:
        if size.where == "L3":
            assert size.num_bytes <= (32 << 20) / 2


def test_a_size_that_caches_hold_is_not_called_memory() -> None:
    huge = (Cache(3, 256 << 20, 4),)
    sizes = sizes_to_read(huge, 64 << 30, 4)
    assert [size.num_bytes for size in sizes if size.where == "memory"] == [1 << 30]


@needs_compiler
def test_the_kernel_reads_every_byte() -> None:
    reader = NativeReader(1 << 20, 2)
    total = ctypes.c_uint64()
    library = native.load(SOURCE)
    library.read_passes(
        ctypes.c_void_p(reader._address),
        ctypes.c_size_t(1 << 20),
        ctypes.c_int(3),
        ctypes.c_int(2),
        ctypes.byref(total),
    )
    assert total.value == 3 * (1 << 17) * 0x0101010101010101 % 2**64


@pytest.mark.parametrize("create", [pytest.param(NativeReader, marks=needs_compiler), TorchReader])
def test_readers_take_time_and_leave_torch_alone(create: Callable[[int, int], Reader]) -> None:
    before = torch.get_num_threads()
    assert create(1 << 20, 2).seconds(1 << 19, 2, 2) > 0
    assert torch.get_num_threads() == before


def test_without_a_compiler_torch_reads(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "reasons_against", lambda source: ["no compiler"])
    reader, found = measure_bandwidth((Cache(2, 512 << 10, 1),), 16 << 20, 1)
    assert reader == "torch.sum"
    assert [entry.where for entry in found] == ["L2", "memory"]


def test_every_size_is_read_with_every_number_of_threads(quick: None) -> None:
    _, found = measure_bandwidth((Cache(2, 512 << 10, 2),), 16 << 20, 2)
    assert {(entry.where, entry.threads) for entry in found} == {("L2", 1), ("L2", 2), ("memory", 1), ("memory", 2)}
    assert all(entry.bytes_per_second > 0 for entry in found)


def test_products_have_a_rate_or_a_reason() -> None:
    before = torch.get_num_threads()
    rates = measure_products(1)
    assert [entry.dtype for entry in rates] == ["float32", "bfloat16", "float16", "int8"]
    assert all((entry.operations_per_second is None) == (entry.problem is not None) for entry in rates)
    assert torch.get_num_threads() == before
