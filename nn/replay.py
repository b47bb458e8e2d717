"""Replay: a forward pass of native kernels only, recorded once and repeated by one call.

A decode step of a small model is hundreds of kernels of some ten microseconds each, and Python takes as long to call
one. The calls of a pass depend only on its number of rows (CUDA graphs on GPUs rely on the same), so they are recorded
with their arguments, and later passes with as many rows repeat them without Python.

Two checks guard a replay. A watch sees each of torch's operators while a pass is recorded; one that computes anything
(rather than allocating memory or taking a view) rules out a replay. Before a recording is used, its result must be
compared bit by bit with that of the module on other inputs, in memory that holds NaN (`Replay.forget`).
"""

from __future__ import annotations

import bisect
import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.nn import native

SOURCE = Path(__file__).with_name("replay.c")
_ALIGNMENT = 64
_NO_NUMBER = 0xFF
"""Bytes that are NaN in every floating-point dtype."""

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Calls = Sequence[tuple[native.Kernel, ctypes.Structure]]


class _Call(ctypes.Structure):
    """`Call` of replay.c."""

    _fields_ = (("function", ctypes.c_void_p), ("arguments", ctypes.c_void_p))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what torch reserves, and the first operator that computes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reserved: list[torch.Tensor] = []
        self.computed: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's own switch: without it the first operator imports the compiler, which takes two seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _reserving():
            self.reserved.append(result)
        elif self.computed is None and not _is_view(func, args, result):
            self.computed = str(func)
        return result


@functools.cache
def _reserving() -> frozenset[Any]:
    aten = torch.ops.aten
    return frozenset(
        {
            aten.empty.memory_format,
            aten.empty_like.default,
            aten.empty_strided.default,
            aten.new_empty.default,
            aten.new_empty_strided.default,
        }
    )


def _is_view(func: Any, args: Sequence[Any], result: Any) -> bool:
    """Whether an operator changed no memory and returned only views of its first argument."""
    if func._schema.is_mutable or not args or not isinstance(args[0], torch.Tensor):
        return False
    own = args[0].untyped_storage().data_ptr()
    results = result if isinstance(result, list | tuple) else [result]
    return all(isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() == own for each in results)


@dataclass(frozen=True)
class _Buffer:
    """Memory that a recorded pass reserved, and the first and last call that touch it."""

    address: int
    num_bytes: int
    first: int
    last: int

    @property
    def end(self) -> int:
        """The address behind it."""
        return self.address + self.num_bytes


class Replay:
    """One recorded pass: its calls, the memory that they work in, the inputs that they read."""

    def __init__(self, calls: Calls, reserved: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], output: Any):
        buffers = _lifetimes(calls, reserved, output.data_ptr())
        offsets, num_bytes = _arrange(buffers)
        self._memory = torch.empty(num_bytes + _ALIGNMENT, dtype=torch.uint8)
        base = _aligned(self._memory.data_ptr())
        places = {buffer.address: base + offset for buffer, offset in zip(buffers, offsets, strict=True)}
        index = _Index(buffers)
        self.inputs = inputs
        self._arguments = [_moved(arguments, index, places) for _, arguments in calls]
        pairs = zip(calls, self._arguments, strict=True)
        self._calls = (_Call * len(calls))(
            *(_Call(kernel.address, ctypes.addressof(arguments)) for (kernel, _), arguments in pairs)
        )
        self._run = native.load(SOURCE).replay
        self._run.argtypes, self._run.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_int64
        holder = index.find(output.data_ptr())
        if holder is None:
            raise ValueError("no recorded call touches the result")
        start = places[holder.address] + output.data_ptr() - holder.address - self._memory.data_ptr()
        size = output.numel() * output.itemsize
        self._output = self._memory[start : start + size].view(output.dtype).view(output.shape)

    def forget(self) -> None:
        """Fills the memory with NaN."""
        self._memory.fill_(_NO_NUMBER)

    def run(self) -> torch.Tensor:
        """Repeats the pass over the current `inputs`. The result is valid until the next run."""
        failed = self._run(ctypes.addressof(self._calls), len(self._calls))
        if failed >= 0:
            raise RuntimeError(f"call {failed} of {len(self._calls)} in a replayed forward pass failed")
        return self._output


def record(forward: Forward, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, Replay | str]:
    """Runs `forward` over `inputs`, which a replay will read from their memory. Returns its result, and the replay or
    the reason why it cannot be replayed."""
    with native.recorded_calls() as calls, _Watch() as watch:
        output = forward(*inputs)
    if watch.computed is not None:
        return output, f"torch computes {watch.computed}"
    if not calls:
        return output, "it calls no kernel that can be recorded"
    if not isinstance(output, torch.Tensor) or not output.is_contiguous():
        return output, "its result is no contiguous tensor"
    try:
        return output, Replay(calls, watch.reserved, inputs, output)
    except ValueError as error:
        return output, str(error)


class _Index:
    """Finds the buffer that an address lies in."""

    def __init__(self, buffers: Sequence[_Buffer]):
        self._buffers = sorted(buffers, key=lambda buffer: buffer.address)
        self._starts = [buffer.address for buffer in self._buffers]

    def find(self, address: int | None) -> _Buffer | None:
        place = bisect.bisect_right(self._starts, address or 0) - 1
        if place < 0 or address is None or address >= self._buffers[place].end:
            return None
        return self._buffers[place]


def _lifetimes(calls: Calls, reserved: Sequence[torch.Tensor], output: int) -> list[_Buffer]:
    """The buffers that any call touches, in the order of first use; that of the output lives to the end."""
    sizes = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in reserved}
    index = _Index([_Buffer(address, num_bytes, 0, 0) for address, num_bytes in sizes.items()])
    uses: dict[int, list[int]] = {}
    for i, (_, arguments) in enumerate(calls):
        for _, pointer in _pointers(arguments):
            buffer = index.find(pointer)
            if buffer is not None:
                uses.setdefault(buffer.address, []).append(i)
    holder = index.find(output)
    return [
        _Buffer(address, sizes[address], seen[0], len(calls) if holder and holder.address == address else seen[-1])
        for address, seen in uses.items()
    ]


def _arrange(buffers: Sequence[_Buffer]) -> tuple[list[int], int]:
    """Returns an offset for each buffer, so that no two that live at the same time overlap, and the total bytes: first
    fit, in the order of first use."""
    places = [0] * len(buffers)
    total = 0
    placed: list[int] = []
    for i in sorted(range(len(buffers)), key=lambda i: buffers[i].first):
        alive = [j for j in placed if buffers[j].last >= buffers[i].first]
        start = 0
        for j in sorted(alive, key=places.__getitem__):
            if start + buffers[i].num_bytes <= places[j]:
                break
            start = max(start, places[j] + _aligned(buffers[j].num_bytes))
        places[i] = start
        total = max(total, start + _aligned(buffers[i].num_bytes))
        placed.append(i)
    return places, total


def _moved(arguments: ctypes.Structure, index: _Index, places: Mapping[int, int]) -> Any:
    """A copy of arguments whose pointers into buffers point to the buffers' new addresses, `places`."""
    copy = type(arguments).from_buffer_copy(arguments)
    for name, pointer in _pointers(arguments):
        buffer = index.find(pointer)
        if buffer is not None:
            setattr(copy, name, places[buffer.address] + pointer - buffer.address)
    return copy


def _pointers(arguments: ctypes.Structure) -> list[tuple[str, int]]:
    """The fields that are pointers, null ones left out."""
    found = ((name, getattr(arguments, name)) for name in native.address_fields(type(arguments)))
    return [(name, value) for name, value in found if value is not None]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
