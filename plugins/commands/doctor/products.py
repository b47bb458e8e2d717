"""How fast torch multiplies matrices: what prefill and large batches can reach."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from dovetail.plugins.commands.doctor.facts import ProductRate

_FIRST, _LARGEST = 256, 2048
_SECONDS = 0.15
"""Of multiplying, about, per dtype."""
_TRIALS = 3


def measure_products(num_threads: int) -> tuple[ProductRate, ...]:
    """float32, bfloat16, float16 and int8 (with int32 sums), with `num_threads` threads. About a second."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        return tuple(_rate(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8))
    finally:
        torch.set_num_threads(before)


def _rate(dtype: torch.dtype) -> ProductRate:
    name = str(dtype).removeprefix("torch.")
    try:
        return ProductRate(name, _best_rate(dtype))
    except (RuntimeError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0]
        return ProductRate(name, None, f"torch has no such product here: {reason}")


def _best_rate(dtype: torch.dtype) -> float:
    """Operations per second, from the largest square product that fits the time: without instructions for a dtype,
    products take a hundred times longer."""
    size = _FIRST
    _seconds(dtype, size)  # the first product also sets up the library behind it
    best = min(_seconds(dtype, size), _seconds(dtype, size))
    while size < _LARGEST and 8 * best < _SECONDS:
        size *= 2
        best = min(_seconds(dtype, size), _seconds(dtype, size))
    for _ in range(max(_TRIALS, min(50, int(_SECONDS / best)))):
        best = min(best, _seconds(dtype, size))
    return 2 * size**3 / best


def _seconds(dtype: torch.dtype, size: int) -> float:
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.mm
    if dtype == torch.int8:
        left = torch.ones(size, size, dtype=dtype)
        multiply = torch._int_mm
    else:
        left = torch.full((size, size), 1 / size, dtype=dtype)
    right = left.clone()
    started = perf_counter()
    multiply(left, right)
    return perf_counter() - started
