"""bfloat16 and float8 in Triton's interpreter, which keeps them as bits and computes with the bits: here they are
widened to float32, computed with, and rounded by torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import ir as _ir
from triton.runtime import interpreter

_Handle = interpreter.TensorHandle
_Builder = interpreter.InterpreterBuilder

_NARROW = {"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
_BITS = {2: (np.uint16, torch.uint16), 1: (np.uint8, torch.uint8)}


def _is_narrow(handle: Any) -> bool:
    return handle.dtype.scalar.name in _NARROW


def _widened(handle: Any) -> Any:
    """In float32, if it is one of the narrow types."""
    name = handle.dtype.scalar.name
    if name not in _NARROW:
        return handle
    dtype = _NARROW[name]
    bits, torch_bits = _BITS[dtype.itemsize]
    held = torch.from_numpy(np.array(handle.data, dtype=bits)).view(torch_bits).view(dtype)
    return _Handle(held.float().numpy(), tl.float32)


def _rounded(data: np.ndarray, target: Any) -> Any:
    """To the nearest even, as torch rounds: beyond the largest number comes infinity, or NaN in e4m3fn, so that a clamp
    that is missing shows."""
    dtype = _NARROW[target.name]
    bits, torch_bits = _BITS[dtype.itemsize]
    near = torch.from_numpy(np.array(data, dtype=np.float32)).to(dtype)
    return _Handle(near.view(torch_bits).numpy().astype(bits, copy=False), target)


def _cast(original: Callable[..., Any], builder: Any, source: Any, target: Any) -> Any:
    scalar = target.scalar
    if source.dtype.scalar == scalar or not (_is_narrow(source) or scalar.name in _NARROW):
        return original(builder, source, target)
    wide = _widened(source)
    if scalar.name in _NARROW:
        return _rounded(wide.data, scalar)
    return wide if scalar == tl.float32 else original(builder, wide, target)


def _through_float32(original: Callable[..., Any], num_operands: int) -> Callable[..., Any]:
    """An operation over the bits as one over the numbers, whose result is rounded once."""

    def computed(builder: Any, *arguments: Any) -> Any:
        operands, rest = arguments[:num_operands], arguments[num_operands:]
        if not any(_is_narrow(operand) for operand in operands):
            return original(builder, *arguments)
        kept = operands[-1].dtype.scalar
        result = original(builder, *map(_widened, operands), *rest)
        is_number = np.issubdtype(result.data.dtype, np.floating) and kept.name in _NARROW
        return _rounded(result.data, kept) if is_number else result

    return computed


def _dot(original: Callable[..., Any]) -> Callable[..., Any]:
    def product(builder: Any, left: Any, right: Any, *rest: Any) -> Any:
        return original(builder, _widened(left), _widened(right), *rest)

    return product


def _select(builder: Any, condition: Any, left: Any, right: Any) -> Any:
    """Moves bits, and needs no widening."""
    return _Handle(np.where(condition.data, left.data, right.data), right.dtype.scalar)


@contextmanager
def right_numbers() -> Iterator[None]:
    """While it is active, bfloat16, float8_e4m3fn and float8_e5m2 are numbers in the interpreter."""
    cast, convert = _Builder.cast_impl, _Builder.create_fp_to_fp

    def converted(builder: Any, source: Any, target: Any, rounding: Any) -> Any:
        is_cut = rounding == _ir.ROUNDING_MODE.RTZ
        return convert(builder, source, target, rounding) if is_cut else _cast(cast, builder, source, target)

    replaced: dict[str, Any] = {
        "binary_op": _through_float32(_Builder.binary_op, 2),
        "ternary_op": _through_float32(_Builder.ternary_op, 3),
        "unary_op": _through_float32(_Builder.unary_op, 1),
        "create_fma": _through_float32(_Builder.create_fma, 3),
        "create_rsqrt": _through_float32(_Builder.create_rsqrt, 1),
        "create_dot": _dot(_Builder.create_dot),
        "create_select": _select,
        "cast_impl": lambda builder, source, target: _cast(cast, builder, source, target),
        "create_fp_to_fp": converted,
        # Triton 3.6 and 3.7 have no constants of bfloat16.
        "get_bf16": lambda builder, value: _rounded(np.array([value]), tl.bfloat16),
    }
    before = {name: _Builder.__dict__.get(name) for name in replaced}
    for name, function in replaced.items():
        setattr(_Builder, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            if function is None:
                delattr(_Builder, name)
            else:
                setattr(_Builder, name, function)
