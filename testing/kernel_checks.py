"""Triton kernels run on the CPU, with what they do to memory checked, and with bfloat16 and float8 that are numbers."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction, mangle_type

from dovetail.testing._kernel_memory import KernelFault, LaunchMemory
from dovetail.testing._kernel_numbers import right_numbers

__all__ = ["CheckedLaunches", "KernelFault", "checked_kernels"]

_Builder = interpreter.InterpreterBuilder
_builder = interpreter.interpreter_builder
_LANGUAGE = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
"""What the interpreter has to replace for a kernel and for all that it calls."""


@dataclass
class CheckedLaunches:
    """What ran so far."""

    launches: int = 0
    accesses: int = 0
    """Elements that programs loaded, stored, or changed atomically."""
    dumps: list[torch.Tensor] = field(default_factory=list)
    """Memory that nobody looks at: several programs may write to it, as those of tokens that fill up a graph do."""


@contextmanager
def checked_kernels() -> Iterator[CheckedLaunches]:
    """While it is active, launches of Triton kernels over tensors on the CPU run in Triton's interpreter, with
    TRITON_INTERPRET or without, and raise `KernelFault` where a program

    - touches an address outside of the tensor that it was computed from (masked ones are not touched), or one that is
      not aligned to the element's size;
    - touches what another program of the launch touches, unless both only read or both are atomic: programs run in any
      order.

    The error names kernel, program, line, tensor and offset. bfloat16, float8_e4m3fn and float8_e5m2 are cast and
    computed with through float32, rounded to nearest even; numbers beyond the largest become what torch makes of them
    (infinity, or NaN in e4m3fn), since not all GPUs clamp. What the interpreter leaves out stays left out: tf32 and the
    GPU's order of summation. One thread at a time.
    """
    seen = CheckedLaunches()
    with ExitStack() as stack:
        stack.enter_context(np.errstate(all="ignore"))  # a GPU gives infinity and NaN without a word
        stack.enter_context(right_numbers())
        for owner, name, replacement in _replacements(seen):
            stack.callback(setattr, owner, name, owner.__dict__[name])
            setattr(owner, name, replacement)
        yield seen


def _replacements(seen: CheckedLaunches) -> list[tuple[Any, str, Callable[..., Any]]]:
    """What runs a kernel, what calls a function of one, and what touches memory."""
    running = _Running()

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        if not warmup:
            running.launch(kernel, grid, arguments, named, seen)

    def call(function: Any, *arguments: Any, **named: Any) -> Any:
        return _rewritten(function)(*arguments, **named)

    found: list[tuple[Any, str, Callable[..., Any]]] = []
    for kind in (JITFunction, interpreter.InterpretedFunction):
        found += [(kind, "run", run), (kind, "__call__", call)]
    for name, kind in (
        ("create_masked_load", "load"),
        ("create_masked_store", "store"),
        ("create_atomic_rmw", "atomic"),
        ("create_atomic_cas", "atomic"),
    ):
        found.append((_Builder, name, running.checked(kind, _Builder.__dict__[name])))
    return found


class _Running:
    """The launch that is under way in each thread."""

    def __init__(self) -> None:
        self._local = threading.local()

    def launch(
        self, kernel: Any, grid: Any, arguments: tuple[Any, ...], named: Mapping[str, Any], seen: CheckedLaunches
    ) -> None:
        function = _rewritten(kernel)
        parameters = inspect.signature(kernel.fn).parameters
        bound = inspect.signature(kernel.fn).bind(
            *arguments, **{name: value for name, value in named.items() if name in parameters}
        )
        bound.apply_defaults()
        values = bound.arguments
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        memory = LaunchMemory(kernel.fn.__name__, tensors, seen.dumps)
        constants = set(_constants(kernel.fn))
        given = {
            name: value if name in constants else _converted(name, value, memory) for name, value in values.items()
        }
        sizes = [*(grid(values) if callable(grid) else grid), 1, 1][:3]
        self._local.memory = memory
        scope = interpreter._patch_lang(_LANGUAGE)
        # Of Triton 3.6, loops fail with numpy 2.4, which makes no integer of an array of one element.
        scope.set_attr(tl.tensor, "__index__", lambda number: int(number.handle.data.squeeze()))
        try:
            _builder.set_grid_dim(*sizes)
            for x, y, z in product(*map(range, sizes)):
                _builder.set_grid_idx(x, y, z)
                memory.program = x, y, z
                function(**given)
        finally:
            scope.restore()
            self._local.memory = None
            seen.launches += 1
            seen.accesses += memory.accesses

    def checked(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """`original` with addresses that were looked at, and made real."""
        place_of_pointer = 1 if original.__name__ == "create_atomic_rmw" else 0

        def touched(builder: Any, *arguments: Any) -> Any:
            given = list(arguments)
            pointers = given[place_of_pointer]
            mask = _mask_of(original.__name__, given)
            size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            real = self._local.memory.real_addresses(kind, pointers.data, mask, size)
            given[place_of_pointer] = interpreter.TensorHandle(real, pointers.dtype)
            return original(builder, *given)

        return touched


def _mask_of(operation: str, arguments: list[Any]) -> np.ndarray:
    place = {"create_masked_load": 1, "create_masked_store": 2, "create_atomic_rmw": 3}.get(operation)
    return np.ones(1, dtype=bool) if place is None else arguments[place].data


def _rewritten(kernel: Any) -> Callable[..., Any]:
    """The function as the interpreter runs it."""
    function: Callable[..., Any] = interpreter.InterpretedFunction(kernel.fn).rewrite()
    return function


def _constants(function: Callable[..., Any]) -> list[str]:
    notes = inspect.get_annotations(function)
    return [name for name, note in notes.items() if "constexpr" in str(note)]


def _converted(name: str, value: Any, memory: LaunchMemory) -> Any:
    """An argument as the kernel sees it."""
    if not isinstance(value, torch.Tensor):
        return interpreter._implicit_cvt(value)
    kind = tl.str_to_ty(mangle_type(value), None)
    return tl.tensor(interpreter.TensorHandle(np.array([memory.base(name)], dtype=np.uint64), kind), kind)
