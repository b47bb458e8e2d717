"""The operator set around ops.c."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, ClassVar

import torch

from dovetail.contracts.operators import AddsNarrowLowRank, OperatorsCapabilities, OperatorsNeed
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.nn import native
from dovetail.plugins.operators.native import low_rank

SOURCE = Path(__file__).with_name("ops.c")
NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""dtypes served, as the kernels' names spell them."""
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_THREADS = ("threads", ctypes.c_int32)


class _NormCall(ctypes.Structure):
    """`NormCall` of ops.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("out", "x")),
        *((name, _INT) for name in ("tokens", "token_stride", "num_heads", "head_stride")),
        ("weight", _POINTER),
        ("size", _INT),
        ("eps", _FLOAT),
        _THREADS,
    )


class _AddNormCall(ctypes.Structure):
    """`AddNormCall` of ops.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "residual")),
        ("rows", _INT),
        ("weight", _POINTER),
        ("size", _INT),
        ("eps", _FLOAT),
        _THREADS,
    )


class _SiluCall(ctypes.Structure):
    """`SiluCall` of ops.c."""

    _fields_ = (*((name, _POINTER) for name in ("out", "gate_up")), *((name, _INT) for name in ("rows", "n")), _THREADS)


class _RotateCall(ctypes.Structure):
    """`RotateCall` of ops.c."""

    _fields_ = (
        ("x", _POINTER),
        *((name, _INT) for name in ("tokens", "token_stride", "num_heads", "head_stride")),
        *((name, _POINTER) for name in ("cos", "sin")),
        *((name, _INT) for name in ("angle_stride", "half")),
        _THREADS,
    )


class _TakeCall(ctypes.Structure):
    """`TakeCall` of ops.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("out", "table", "ids")),
        *((name, _INT) for name in ("count", "num_rows", "row_bytes")),
    )


class KernelTable(dict[Any, native.Kernel]):
    """Kernels by the dtypes of their tensors."""

    def __missing__(self, dtypes: Any) -> native.Kernel:
        raise TypeError(f"the native operators have no kernel for {dtypes}")


class NativeOperators(AddsNarrowLowRank):
    """C kernels for float32 and bfloat16 on CPUs: one call each, no copies of inputs in the form that the model leaves
    them."""

    contract = (1, 3)
    stability = "provisional"
    preference: ClassVar[int] = 5
    capabilities = OperatorsCapabilities(
        device_types=frozenset({"cpu"}), dtypes=frozenset({"float32", "bfloat16"}), graph_capture=True
    )

    @classmethod
    def check(cls, need: OperatorsNeed, options: Any, environment: Environment) -> list[str]:
        """Compiles the kernels, unless they were compiled before."""
        return native.reasons_against(SOURCE) or native.reasons_against(low_rank.SOURCE)

    def __init__(self, options: PluginOptions):
        super().__init__(options)
        library = native.load(SOURCE)
        self._rms_norm = _norm_kernels(library, "rms_norm_call", _NormCall)
        self._add_rms_norm = _norm_kernels(library, "add_rms_norm_call", _AddNormCall)
        self._silu_mul = _kernels(library, "silu_mul_call", _SiluCall)
        self._rotate = _kernels(library, "rotate_call", _RotateCall)
        self._low_rank = low_rank.LowRankKernels()
        self._take_rows = native.Kernel(library, "take_rows_call", _TakeCall)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        dtypes = x.dtype, weight.dtype
        shape = x.shape
        size = _size(shape, weight)
        if x.is_contiguous():
            out = torch.empty_like(x)
            layout = x.numel() // size, size, 1, size
            sizes = size, eps, torch.get_num_threads()
            self._rms_norm[dtypes](out.data_ptr(), x.data_ptr(), *layout, weight.data_ptr(), *sizes)
            return out
        strides = x.stride()
        if len(shape) != 3 or strides[2] != 1:
            return self.rms_norm(x.contiguous(), weight, eps)
        out = x.new_empty(shape)
        pointers = out.data_ptr(), x.data_ptr()
        layout = shape[0], strides[0], shape[1], strides[1]
        self._rms_norm[dtypes](*pointers, *layout, weight.data_ptr(), size, eps, torch.get_num_threads())
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In the memory of x and residual."""
        kernel = self._add_rms_norm[x.dtype, weight.dtype]
        shape = x.shape
        size = _size(shape, weight)
        if residual.shape != shape or residual.dtype != x.dtype:
            raise ValueError(f"a residual {list(residual.shape)} {residual.dtype} for {list(shape)} {x.dtype}")
        x, residual = x.contiguous(), residual.contiguous()
        kernel(x.data_ptr(), residual.data_ptr(), shape[0], weight.data_ptr(), size, eps, torch.get_num_threads())
        return x, residual

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        kernel = self._silu_mul[gate_up.dtype]
        gate_up = gate_up.contiguous()
        rows, double = gate_up.shape
        out = gate_up.new_empty(rows, double // 2)
        kernel(out.data_ptr(), gate_up.data_ptr(), rows, double // 2, torch.get_num_threads())
        return out

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotates in place, where the elements of a head are contiguous."""
        kernel = self._rotate[heads.dtype]
        tokens, num_heads, head_size = heads.shape
        angles = cos.shape
        if angles[0] != tokens or angles[2] > head_size or not heads.dtype == cos.dtype == sin.dtype:
            raise ValueError(f"angles {list(angles)} {cos.dtype} for heads {list(heads.shape)} {heads.dtype}")
        strides, angle_strides = heads.stride(), cos.stride()
        if strides[2] != 1:
            return self.rotate(_copy(heads), cos, sin)
        if angle_strides[2] != 1 or sin.stride() != angle_strides:
            return self.rotate(heads, _copy(cos), _copy(sin))
        layout = tokens, strides[0], num_heads, strides[1]
        sizes = angle_strides[0], angles[2] // 2, torch.get_num_threads()
        kernel(heads.data_ptr(), *layout, cos.data_ptr(), sin.data_ptr(), *sizes)
        return heads

    def take_rows(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Copies rows as bytes."""
        table, ids = table.contiguous(), ids.contiguous()
        out = table.new_empty(ids.shape + table.shape[1:])
        row_bytes = table.nbytes // max(1, len(table))  # strides say 1 where a dimension is 0
        pointers = out.data_ptr(), table.data_ptr(), ids.data_ptr()
        if self._take_rows(*pointers, len(ids), len(table), row_bytes):
            raise IndexError(f"rows {ids.tolist()} of a table of {len(table)}")
        return out

    def add_low_rank(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        part_starts: torch.Tensor,
        ranks: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        self._low_rank.add(y, x, a, b, part_starts, ranks, slots)


def _size(shape: torch.Size, weight: torch.Tensor) -> int:
    size = weight.shape[0]
    if shape[-1] != size:
        raise ValueError(f"a norm of {size} elements for rows of {shape[-1]}")
    return size


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Row-major, in the strides of dimensions of one element as well, which `contiguous` leaves as they are."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _kernels(library: ctypes.CDLL, name: str, arguments: type[ctypes.Structure]) -> KernelTable:
    """By the dtype of the rows."""
    return KernelTable(
        {dtype: native.Kernel(library, f"{name}_{suffix}", arguments) for dtype, suffix in NAMES.items()}
    )


def _norm_kernels(library: ctypes.CDLL, name: str, arguments: type[ctypes.Structure]) -> KernelTable:
    """By the dtypes of rows and weights."""
    pairs = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
    return KernelTable(
        {(x, weight): native.Kernel(library, f"{name}_{NAMES[x]}_{NAMES[weight]}", arguments) for x, weight in pairs}
    )
