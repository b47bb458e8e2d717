"""The adapters of one rank: some in slots next to the weights, more of them in host memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from dovetail.config.resolved import ResolvedLoRA
from dovetail.contracts.device import Device
from dovetail.contracts.errors import ModelError
from dovetail.contracts.step import AdapterPlacement, NewRequest
from dovetail.nn.adapters import AdapterSpace, LowRank
from dovetail.worker.adapters.peft_files import StoredMatrix, open_adapter

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class WorkerAdapters:
    """Places adapters where plans say, and knows the slot of each."""

    def __init__(self, space: AdapterSpace, device: Device, max_kept: int):
        """`max_kept`: adapters that stay in host memory, those in slots among them."""
        self._space = space
        self._device = device
        self._max_kept = max_kept
        self._kept: OrderedDict[str, dict[str, LowRank]] = OrderedDict()
        """By digest, the one that was placed last at the end."""
        self._slots: dict[str, int] = {}
        """By digest."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The memory of all slots."""
        return [tensor for layer in self._space.layers for tensor in (layer.a, layer.b, layer.ranks)]

    def place(self, placements: Iterable[AdapterPlacement]) -> None:
        """Brings adapters to their slots, before whatever is handed to the device next. Raises `ModelError` for files
        that are not those that were checked; the slot is nobody's then."""
        for placement in placements:
            self._slots = {digest: slot for digest, slot in self._slots.items() if slot != placement.slot}
            layers = self._layers(placement)
            self._device.launch(partial(self._load, placement.slot, layers))
            self._slots[placement.digest] = placement.slot

    def forget_slots(self) -> None:
        """What was in slots is lost."""
        self._slots.clear()

    def slot_of(self, request: NewRequest) -> int:
        """The slot of a request's adapter, -1 for none. Raises `ModelError` where it is in none."""
        if request.adapter is None:
            return -1
        slot = self._slots.get(request.adapter)
        if slot is None:
            raise ModelError(f"the adapter of request {request.request_id} could not be brought to its slot")
        return slot

    @torch.inference_mode()
    def _load(self, slot: int, layers: dict[str, LowRank]) -> None:
        self._space.load(slot, layers)

    def _layers(self, placement: AdapterPlacement) -> dict[str, LowRank]:
        if placement.digest not in self._kept:
            self._kept[placement.digest] = _read(placement)
        self._kept.move_to_end(placement.digest)
        while len(self._kept) > self._max_kept:
            self._kept.popitem(last=False)
        return self._kept[placement.digest]


def create_adapter_space(lora: ResolvedLoRA | None, device: torch.device) -> AdapterSpace | None:
    """Slots for the adapters of a config; None where it has none."""
    return None if lora is None else AdapterSpace(lora.max_loras, lora.max_rank, getattr(torch, lora.dtype), device)


def rows_of(adapters: WorkerAdapters | None, requests: Sequence[NewRequest], counts: np.ndarray) -> np.ndarray | None:
    """int32 [sum of counts]: the slot of each token's adapter; None where no request has one."""
    if adapters is None or not any(request.adapter is not None for request in requests):
        return None
    slots = np.fromiter(map(adapters.slot_of, requests), np.int32, len(requests))
    return slots if len(slots) == counts.sum() else np.repeat(slots, counts)


def _read(placement: AdapterPlacement) -> dict[str, LowRank]:
    files = open_adapter(Path(placement.path))
    found = files.digest()
    if found != placement.digest:
        raise ModelError(
            f"the files of adapter {placement.name!r} in {placement.path} changed since it was loaded: unload it and"
            " load it again"
        )
    return {
        name: LowRank(as_tensor(a, layer.a), as_tensor(b, layer.b), layer.scale) for name, layer, a, b in files.data()
    }


def as_tensor(data: bytearray, stored: StoredMatrix) -> torch.Tensor:
    """A matrix of `AdapterFiles.data`, in its shape and dtype; shares the memory of `data`."""
    return torch.frombuffer(data, dtype=_DTYPES[stored.dtype]).reshape(stored.shape)
