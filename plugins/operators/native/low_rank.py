"""The kernels of low_rank.c, which add low-rank adapters."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from dovetail.nn import native

SOURCE = Path(__file__).with_name("low_rank.c")
_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_DTYPES = (
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16),
)
"""Of rows and of adapters."""
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class _LowRankCall(ctypes.Structure):
    """`LowRankCall` of low_rank.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("y", "x", "a", "b", "part_starts", "ranks", "slots", "scratch")),
        *((name, _INT) for name in ("rows", "y_stride", "x_stride", "num_slots", "num_parts", "max_rank")),
        *((name, _INT) for name in ("in_features", "out_features")),
        ("threads", ctypes.c_int32),
    )


class LowRankKernels:
    """One kernel for each dtype of rows and of adapters."""

    def __init__(self) -> None:
        library = native.load(SOURCE)
        self._scratch_bytes = library.scratch_bytes
        self._scratch_bytes.argtypes, self._scratch_bytes.restype = (_INT,) * 4, _INT
        self._kernels = {
            dtypes: native.Kernel(library, f"add_low_rank_{'_'.join(map(_NAMES.__getitem__, dtypes))}", _LowRankCall)
            for dtypes in _DTYPES
        }

    def add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        part_starts: torch.Tensor,
        ranks: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """As `AddsNarrowLowRank.add_low_rank`."""
        kernel = self._kernels.get((y.dtype, a.dtype))
        if kernel is None or y.dtype != x.dtype or a.dtype != b.dtype:
            raise TypeError(f"no kernel adds {a.dtype} x {b.dtype} adapters of {x.dtype} rows to {y.dtype} ones")
        rows, out_features = y.shape
        num_slots, num_parts, max_rank, in_features = a.shape
        if x.shape != (rows, in_features) or b.shape != (num_slots, max_rank, out_features) or slots.shape != (rows,):
            raise ValueError(
                f"rows {list(x.shape)} -> {list(y.shape)} and {list(slots.shape)} slots for adapters {list(a.shape)} "
                f"and {list(b.shape)}"
            )
        y_strides, x_strides = y.stride(), x.stride()
        if y_strides[1] != 1 or x_strides[1] != 1:
            raise ValueError("the elements of a row must be contiguous")
        scratch = x.new_empty(self._scratch_bytes(rows, num_slots, num_parts, max_rank), dtype=torch.uint8)
        adapters = a.data_ptr(), b.data_ptr(), part_starts.data_ptr(), ranks.data_ptr(), slots.data_ptr()
        strides = y_strides[0], x_strides[0]
        sizes = num_slots, num_parts, max_rank, in_features, out_features
        kernel(
            *(y.data_ptr(), x.data_ptr(), *adapters, scratch.data_ptr()),
            *(rows, *strides, *sizes, torch.get_num_threads()),
        )
