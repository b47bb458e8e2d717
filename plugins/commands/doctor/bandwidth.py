"""How fast memory can be read, from L2 to RAM, by one thread and by several."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Protocol

import torch

from dovetail.nn.native import load, reasons_against
from dovetail.plugins.commands.doctor.facts import Bandwidth, Cache

SOURCE = Path(__file__).with_name("read_memory.c")

_GRAIN = 256 * 1024
"""Sizes are multiples of it, so that threads get whole vectors."""
_LARGEST = 1 << 30
_SHARE_OF_FREE = 4
_SECONDS = 0.12
"""Of reading, about, per size and number of threads."""
_TRIALS = 4


@dataclass(frozen=True)
class Size:
    """How much is read, and what holds it."""

    num_bytes: int
    where: str


class Reader(Protocol):
    """Reads a buffer again and again."""

    name: str
    least: int
    """Bytes to read per trial."""

    def seconds(self, num_bytes: int, num_passes: int, num_threads: int) -> float:
        """Time of `num_passes` passes over the first `num_bytes` bytes."""


class NativeReader:
    """A C kernel of vector additions."""

    name = "a C kernel"
    least = 256 << 20  # threads meet once in a trial, which must not count

    def __init__(self, num_bytes: int, num_threads: int):
        self._library = load(SOURCE)
        self._library.read_passes.restype = ctypes.c_double
        # numpy's and malloc's own alignment is 16 bytes; vectors want 64.
        self._buffer = torch.empty(num_bytes + 64, dtype=torch.uint8)
        self._address = -(-self._buffer.data_ptr() // 64) * 64
        self._library.fill(ctypes.c_void_p(self._address), ctypes.c_size_t(num_bytes), ctypes.c_int(num_threads))

    def seconds(self, num_bytes: int, num_passes: int, num_threads: int) -> float:
        """See `Reader`."""
        total = ctypes.c_uint64()
        seconds: float = self._library.read_passes(
            ctypes.c_void_p(self._address),
            ctypes.c_size_t(num_bytes),
            ctypes.c_int(num_passes),
            ctypes.c_int(num_threads),
            ctypes.byref(total),
        )
        return seconds


class TorchReader:
    """torch's sum, where nothing can be compiled: as fast as the memory, slower than the caches."""

    name = "torch.sum"
    least = 1  # threads meet in every call anyway

    def __init__(self, num_bytes: int, num_threads: int):
        self._buffer = torch.ones(num_bytes // 4)

    def seconds(self, num_bytes: int, num_passes: int, num_threads: int) -> float:
        """See `Reader`. Sets torch's threads for the time of the call."""
        part = self._buffer[: num_bytes // 4]
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            started = perf_counter()
            for _ in range(num_passes):
                part.sum()
            return perf_counter() - started
        finally:
            torch.set_num_threads(before)


def measure_bandwidth(caches: Sequence[Cache], available: int, max_threads: int) -> tuple[str, tuple[Bandwidth, ...]]:
    """The reader's name, and the best rate of each size and number of threads. Takes a second or two, and up to
    1 GiB of the `available` bytes."""
    sizes = sizes_to_read(caches, available, max_threads)
    reader = _create_reader(max(size.num_bytes for size in sizes), max_threads)
    return reader.name, tuple(
        Bandwidth(size.num_bytes, size.where, threads, best_rate(reader, size.num_bytes, threads))
        for size in sizes
        for threads in thread_counts(max_threads)
    )


def best_rate(reader: Reader, num_bytes: int, num_threads: int) -> float:
    """Bytes per second of the fastest of a few trials: everything that disturbs only makes them slower."""
    # Threads that slept take a while to come back, so the first call says little.
    reader.seconds(num_bytes, 1, num_threads)
    num_passes = max(1, reader.least // num_bytes)
    while (seconds := reader.seconds(num_bytes, num_passes, num_threads)) < _SECONDS / _TRIALS:
        num_passes *= 2 if seconds > _SECONDS / _TRIALS / 8 else 8
    trials = [seconds, *(reader.seconds(num_bytes, num_passes, num_threads) for _ in range(_TRIALS))]
    return num_bytes * num_passes / min(trials)


def sizes_to_read(caches: Sequence[Cache], available: int, max_threads: int) -> tuple[Size, ...]:
    """What fits half into each cache (so that it stays there), and two sizes that only memory holds."""
    largest = _aligned(min(_LARGEST, available // _SHARE_OF_FREE))
    sizes = []
    for cache in caches:
        if cache.level >= 2:
            # With more instances than threads, the others' caches are no help.
            num_bytes = _aligned(cache.size * min(cache.instances, max_threads) // 2)
            sizes.append(Size(num_bytes, f"L{cache.level}"))
    in_cache = max((cache.size * cache.instances for cache in caches), default=32 << 20)
    sizes += [Size(_aligned(largest // 4), "memory"), Size(largest, "memory")]
    return tuple(size for size in sizes if size.num_bytes <= largest and _is_true(size, in_cache, largest))


def thread_counts(most: int) -> tuple[int, ...]:
    """1, and the powers of 2 below `most`, the last two of them, and `most`."""
    powers = [1 << bit for bit in range(1, most.bit_length()) if 1 << bit < most]
    return tuple(sorted({1, *powers[-2:], most}))


def _is_true(size: Size, in_cache: int, largest: int) -> bool:
    """A size for memory that caches would hold says nothing; the largest stays, for want of a better."""
    return size.where != "memory" or size.num_bytes >= 4 * in_cache or size.num_bytes == largest


def _aligned(num_bytes: int) -> int:
    return max(_GRAIN, num_bytes // _GRAIN * _GRAIN)


def _create_reader(num_bytes: int, num_threads: int) -> Reader:
    if reasons_against(SOURCE):
        return TorchReader(num_bytes, num_threads)
    return NativeReader(num_bytes, num_threads)
