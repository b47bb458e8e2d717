"""The null device's captures: what a CUDA graph would hold is recorded, and nothing else is done again.

A captured graph repeats kernels, with the addresses and numbers that they had when they were captured; Python does not
run again. So a recording here is a list of operations with the very tensors that they read and wrote. A decision of
Python that changed meanwhile, a tensor that was made anew for each step, or a value that was not computed by the graph
then shows as wrong tokens, or as an error. What a CUDA capture refuses is refused here too.

Three kinds of operations are recorded. torch's come through its dispatcher, c10d's collectives among them (gloo's,
which no CUDA graph could hold, stand for NCCL's). Native kernels (`dovetail.nn.native`) and launches in Triton's
interpreter bypass the dispatcher, and are recorded where they are called.
"""

from __future__ import annotations

import ctypes
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from dovetail.contracts.device import Graph, Work
from dovetail.nn import native

_WAITING_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_HOST_READS = frozenset({"tolist", "numpy", "cpu", "__array__"})
_HOST_COPIES = frozenset({"tensor", "as_tensor"})
_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})
_TRITON_KERNELS = (
    ("triton.runtime.interpreter", "InterpretedFunction"),
    ("triton.runtime.jit", "JITFunction"),  # launched where a test has put something in place of a GPU
)
_INDEXING = frozenset({"index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index"})


class CaptureError(RuntimeError):
    """What a CUDA capture refuses, or a graph cannot hold."""


class RecordedGraph(Graph):
    """Operations on the tensors that they were recorded with."""

    def __init__(self, steps: Sequence[_Step]):
        self._steps = steps

    @torch.inference_mode()
    def replay(self) -> None:
        """Does the operations again. Raises `CaptureError` where memory that they read is gone."""
        for step in self._steps:
            step.run()


def capture(work: Work) -> RecordedGraph:
    """Records the operations of `work`.

    Memory from outside is not written by torch's operations meanwhile; native kernels and Triton's, which say not what
    they write, do run. Memory that was made inside is NaN until the first replay.

    Raises:
        CaptureError: for work that waits for the device, reads its memory, or copies the host's to it.
    """
    recorder = _Recorder()
    with native.recorded_calls() as calls, _launches(recorder), _HostAccess(), recorder:
        recorder.watch(calls)
        work()
        recorder.take_native_calls()
    recorder.forget()
    return RecordedGraph(recorder.steps)


class _Step(ABC):
    """One recorded operation."""

    @abstractmethod
    def run(self) -> None:
        """Does it again."""


class _Outside:
    """A tensor in memory that the graph does not own: known by its address, as a graph knows it."""

    def __init__(self, tensor: torch.Tensor):
        self._storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._dtype = tensor.dtype
        self._place = tensor.storage_offset(), tensor.size(), tensor.stride()

    def tensor(self) -> torch.Tensor:
        """Raises `CaptureError` where the memory was freed."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise CaptureError(
                f"a replayed graph reads {self._dtype} {list(self._place[1])} that was freed since it was captured: "
                "what a captured step reads must stay where it is, and be filled anew for each step"
            )
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._place)


class _Operator(_Step):
    """A call of torch's dispatcher; its results go into the memory of the first ones."""

    def __init__(self, func: Any, args: Any, kwargs: Any, results: Mapping[int, torch.Tensor]):
        self._func = func
        self._args = args
        self._kwargs = kwargs
        self._results = results
        """By their index among the flat results; those that share memory with arguments are left out."""

    def run(self) -> None:
        args, kwargs = tree_map(_inside, (self._args, self._kwargs))
        results = tree_leaves(self._func(*args, **kwargs))
        if _is_collective(self._func):
            results[-1].wait()
        for index, target in self._results.items():
            target.copy_(results[index])


class _Allocation(_Step):
    """Memory of the graph's own pool, which holds anything until it is written."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    def run(self) -> None:
        _spoil(self._tensor)


class _NativeCall(_Step):
    """A call of a native kernel."""

    def __init__(self, kernel: native.Kernel, arguments: ctypes.Structure):
        assert kernel.address is not None
        self._function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(kernel.address)
        self._arguments = arguments

    def run(self) -> None:
        if self._function(ctypes.addressof(self._arguments)):
            raise RuntimeError("a native kernel of a replayed graph failed")


class _Launch(_Step):
    """A launch in Triton's interpreter."""

    def __init__(self, launch: Callable[..., None], args: Any, kwargs: Any):
        self._launch = launch
        self._args = args
        self._kwargs = kwargs

    def run(self) -> None:
        args, kwargs = tree_map(_inside, (self._args, self._kwargs))
        self._launch(*args, **kwargs)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what goes through torch's dispatcher, and what `record` hands it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[_Step] = []
        self._pool: dict[int, torch.Tensor] = {}
        """Memory that was made inside, by the address of its storage's record."""
        self._calls: Sequence[tuple[native.Kernel, ctypes.Structure]] = ()
        self._num_taken = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As in `dovetail.nn.replay`: without it the first operator imports the compiler."""
        return False

    def watch(self, calls: Sequence[tuple[native.Kernel, ctypes.Structure]]) -> None:
        """Native calls, which grow while they are recorded."""
        self._calls = calls

    def take_native_calls(self) -> None:
        """Those since the last operation."""
        self.steps += [_NativeCall(*call) for call in self._calls[self._num_taken :]]
        self._num_taken = len(self._calls)

    def launch(self, launch: Callable[..., None], args: Any, kwargs: Any) -> None:
        """Runs and records a launch of Triton's interpreter."""
        self.take_native_calls()
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            launch(*args, **kwargs)
        self.steps.append(_Launch(launch, *tree_map(self._kept, (args, kwargs))))

    @torch.inference_mode()
    def forget(self) -> None:
        """Spoils all memory of the pool: nothing was computed yet."""
        for tensor in self._pool.values():
            _spoil(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.take_native_calls()
        _refuse_waiting(func, args)
        if not _is_collective(func):  # those are no compositions, and have no `decompose` that knows process groups
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        written = _written(func, args, kwargs)
        if any(not self._is_own(tensor) for tensor in written):
            result = _returned(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        known = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        made = {
            index: leaf
            for index, leaf in enumerate(tree_leaves(result))
            if isinstance(leaf, torch.Tensor) and _storage(leaf) not in known
        }
        self._pool |= {_storage(tensor): tensor for tensor in made.values()}
        if _name(func) in _ALLOCATIONS:
            self.steps += [_Allocation(tensor) for tensor in made.values()]
        elif made or func._schema.is_mutable or _is_collective(func):  # else it is a view
            kept_args, kept_kwargs = tree_map(self._kept, (args, kwargs))
            self.steps.append(_Operator(func, kept_args, kept_kwargs, made))

    def _is_own(self, tensor: torch.Tensor) -> bool:
        return _storage(tensor) in self._pool

    def _kept(self, value: Any) -> Any:
        """A tensor of the pool stays; others are remembered by their address. Numbers are kept, as in a launch."""
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.dim() == 0:
            return value
        return value if self._is_own(value) else _Outside(value)


class _HostAccess(TorchFunctionMode):
    """Refuses calls that never reach the dispatcher where tensors are on a CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _HOST_READS:
            raise CaptureError(f"Tensor.{name} reads device memory on the host, which no capture can do")
        result = func(*args, **(kwargs or {}))
        if name in _HOST_COPIES and result.dim():
            raise CaptureError(f"torch.{name} copies host memory to the device, which no capture can do")
        return result


@contextmanager
def _launches(recorder: _Recorder) -> Iterator[None]:
    """Has launches of Triton's kernels, if it is loaded, go through the recorder."""
    with ExitStack() as stack:
        for module, name in _TRITON_KERNELS:
            if module in sys.modules:
                stack.enter_context(_watched(vars(sys.modules[module])[name], recorder))
        yield


@contextmanager
def _watched(kernels: type, recorder: _Recorder) -> Iterator[None]:
    launch = vars(kernels)["run"]
    kernels.run = lambda kernel, *args, **kwargs: recorder.launch(launch.__get__(kernel), args, kwargs)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        kernels.run = launch  # type: ignore[attr-defined]


def _refuse_waiting(func: Any, args: Any) -> None:
    """Raises `CaptureError` for an operator that waits for the device."""
    if _name(func) in _INDEXING:  # tagged for their masks, whose true entries have to be counted
        waits = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    else:
        waits = not _WAITING_TAGS.isdisjoint(func.tags)
    if waits:
        raise CaptureError(f"{func} waits for the device to know a value or a shape, which no capture can do")


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Tensors among the arguments that an operator of torch writes; of collectives, which declare none, none."""
    return [
        leaf
        for argument, value in _arguments(func, args, kwargs)
        if argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(value)
        if isinstance(leaf, torch.Tensor)
    ]


def _returned(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator that was not run returns: the arguments that it writes. Raises `CaptureError` for one that
    returns more."""
    by_alias = {
        frozenset(argument.alias_info.before_set): value
        for argument, value in _arguments(func, args, kwargs)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    returns = func._schema.returns
    aliases = [frozenset(each.alias_info.before_set) if each.alias_info is not None else None for each in returns]
    if any(alias not in by_alias for alias in aliases):
        raise CaptureError(
            f"{func} writes memory from outside the graph and returns more: the null device cannot record it"
        )
    values = [by_alias[alias] for alias in aliases if alias is not None]
    return None if not values else values[0] if len(values) == 1 else tuple(values)


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """The schema's arguments with the values that were given."""
    for index, argument in enumerate(func._schema.arguments):
        if index < len(args):
            yield argument, args[index]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _inside(value: Any) -> Any:
    return value.tensor() if isinstance(value, _Outside) else value


def _name(func: Any) -> str:
    name: str = func._schema.name
    return name.rpartition("::")[2]


def _is_collective(func: Any) -> bool:
    return bool(func.namespace == "c10d")


def _storage(tensor: torch.Tensor) -> int:
    """Identifies the memory of a tensor; one in a library's own layout is memory of its own."""
    if tensor.layout != torch.strided:
        return id(tensor)
    cdata: int = tensor.untyped_storage()._cdata
    return cdata


def _spoil(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
