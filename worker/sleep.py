"""A worker that sleeps gives its device memory back and keeps everything else: tensors stay the same objects, only the
memory behind them goes and comes back, so that all references to them stay valid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dovetail.contracts.device import Device
from dovetail.contracts.quantization import LinearKernel
from dovetail.nn.kernels import packed_kernels
from dovetail.nn.loading import WeightHolder


class Sleeper:
    """One sleep of one worker.

    Level 1 copies the weights to host memory. Level 2 does so only with what the checkpoint does not hold (rotary
    tables); weights are read anew, through kernels that are loaded again. The content of the KV pages is lost. Memory
    that cannot be given back stays: that of a CPU's pages, and of weights in `dovetail.nn.huge_pages.WeightMemory`,
    whose kernels hold addresses and which lie in host memory anyway; level 2 fills it anew all the same.
    """

    def __init__(self, model: Any, kv_tensors: Sequence[torch.Tensor], device: Device, level: int):
        """`kv_tensors`: those whose content is lost, KV pages and slots of adapters."""
        self._device = device
        self._pages = _storages(kv_tensors)
        holders = [module for module in model.modules() if isinstance(module, WeightHolder)]
        everything = _storages(tensor for module in model.modules() for tensor in _tensors(module))
        dropped = _storages(tensor for holder in holders for tensor in _loaded(holder)) if level == 2 else {}
        self.reads_weights = level == 2 and bool(holders)
        """Whether waking up needs the checkpoint."""
        self._dropped = dropped
        self._packed = [kernel for holder in holders for kernel in packed_kernels(holder)] if level == 2 else []
        self._kept = {key: storage for key, storage in everything.items() if key not in dropped}
        self._sizes = {key: s.nbytes() for key, s in (self._pages | self._kept | self._dropped).items()}
        self._copies: dict[int, torch.UntypedStorage] = {}

    def sleep(self) -> int:
        """Gives the memory back; how many bytes."""
        for key, storage in self._kept.items():
            copy = self._device.host_buffer(storage.nbytes(), dtype=torch.uint8).untyped_storage()
            copy.copy_(storage, False)
            self._copies[key] = copy
        for storage in (*self._pages.values(), *self._kept.values(), *self._dropped.values()):
            storage.resize_(0)
        released = sum(kernel.release() for kernel in self._packed)
        self._device.release_unused()
        return sum(self._sizes.values()) + released

    def wake_up(self) -> None:
        """Takes memory again and fills in what was kept; pages are zero. Where it `reads_weights`, they must be read
        now. To be called inside launched work, and again where something failed: it keeps its copies."""
        for key, storage in (self._pages | self._kept | self._dropped).items():
            storage.resize_(self._sizes[key])
        for key, storage in self._kept.items():
            storage.copy_(self._copies[key], False)
        for storage in self._pages.values():
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """The distinct memories behind tensors that can be given back."""
    found = {}
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            continue  # oneDNN's own, see packed_kernels
        storage = tensor.untyped_storage()
        if storage.resizable() and storage.nbytes():
            found[storage.data_ptr()] = storage
    return found


def _tensors(module: torch.nn.Module) -> Iterable[torch.Tensor]:
    for value in vars(module).values():
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, LinearKernel):
            yield from value.tensors()
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _loaded(holder: WeightHolder) -> Iterable[torch.Tensor]:
    """What its `load` fills."""
    for value in vars(holder).values():
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, LinearKernel):
            yield from value.tensors()
