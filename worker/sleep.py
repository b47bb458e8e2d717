"""A region of a worker that sleeps gives its memory back and keeps everything else: tensors stay the same objects, only
the memory behind them goes and comes back, so that all references to them stay valid."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from dovetail.contracts.device import Device
from dovetail.nn.kernels import PackedLinear, packed_kernels
from dovetail.nn.loading import WeightHolder
from dovetail.worker.aside import Aside, create_aside
from dovetail.worker.memory_pieces import Piece, kernel_tensors, module_tensors, pieces_of


class Sleeper:
    """One sleep of one region: `set_aside`, `give_back`, and later `take` as often as it takes, then `close`."""

    def __init__(
        self,
        device: Device,
        *,
        kept: Sequence[Piece] = (),
        lost: Sequence[Piece] = (),
        dropped: Sequence[Piece] = (),
        kept_kernels: Sequence[PackedLinear] = (),
        dropped_kernels: Sequence[PackedLinear] = (),
    ):
        """Contents that are set aside (`kept`), that are zero afterwards (`lost`), and that somebody loads again
        (`dropped`)."""
        self.reads_weights = bool(dropped or dropped_kernels)
        """Whether weights must be loaded after `take`."""
        self._device = device
        self._kept = kept
        self._lost = lost
        self._dropped = dropped
        self._kept_kernels = kept_kernels
        self._dropped_kernels = dropped_kernels
        self._aside: Aside | None = None
        self._numbers: list[int] = []

    def set_aside(self) -> None:
        """Copies what is kept. Changes nothing otherwise; `close` undoes it. Raises `CapacityError`."""
        self._aside = create_aside(self._device)
        try:
            self._numbers = [self._aside.keep(piece.content()) for piece in self._kept]
            self._numbers += [self._aside.keep(_bytes(kernel.plain())) for kernel in self._kept_kernels]
        except BaseException:
            self.close()
            raise

    def give_back(self) -> int:
        """Gives the memory back; how many bytes."""
        given_back = sum(piece.give_back() for piece in (*self._kept, *self._lost, *self._dropped))
        return given_back + sum(kernel.release() for kernel in (*self._kept_kernels, *self._dropped_kernels))

    def take(self) -> None:
        """Takes memory again and fills in what was kept; what was lost is zero. To be called inside launched work, and
        again where something failed."""
        for piece in (*self._kept, *self._lost, *self._dropped):
            piece.take()
        numbers = iter(self._numbers)
        aside = self._aside
        assert aside is not None, "set_aside comes first"
        for piece in self._kept:
            aside.fill(next(numbers), piece.content())
        for kernel in self._kept_kernels:
            weight = torch.empty(kernel.shape, dtype=kernel.dtype)
            aside.fill(next(numbers), _bytes(weight))
            kernel.load(slice(0, len(weight)), weight)
            kernel.finish()
        for piece in self._lost:
            piece.clear()

    def close(self) -> None:
        """Lets go of the copies. Idempotent."""
        aside, self._aside = self._aside, None
        if aside is not None:
            aside.close()


def lost_sleeper(device: Device, tensors: Iterable[torch.Tensor]) -> Sleeper:
    """Of tensors whose content is lost: KV pages."""
    return Sleeper(device, lost=_pieces(tensors))


def weights_sleeper(
    device: Device,
    model: Any,
    slots: Sequence[torch.Tensor],
    level: int,
    *,
    pages: Iterable[torch.Tensor],
) -> Sleeper:
    """Of the weights of a model. Level 1 keeps them; level 2 drops what loading fills, and keeps the rest (rotary
    tables). `slots`: those of adapters, whose content is lost at both. `pages`: those of the KV cache, of which layers
    have views, and which are left alone."""
    holders = [module for module in model.modules() if isinstance(module, WeightHolder)]
    packed = [kernel for holder in holders for kernel in packed_kernels(holder)]
    loaded = [tensor for holder in holders for tensor in kernel_tensors(holder)] if level == 2 else []
    return Sleeper(
        device,
        kept=_pieces(_without(module_tensors(model), [*loaded, *slots], pages)),
        lost=_pieces(slots),
        dropped=_pieces(loaded),
        kept_kernels=[] if level == 2 else packed,
        dropped_kernels=packed if level == 2 else [],
    )


def kept_sleeper(
    device: Device,
    weights: Iterable[torch.Tensor | torch.nn.Module],
    *,
    but: Any,
    pages: Iterable[torch.Tensor],
) -> Sleeper:
    """Of weights that are kept at every level, those that are the module `but`'s left out. `pages`: as in
    `weights_sleeper`."""
    tensors: list[torch.Tensor] = []
    packed: list[PackedLinear] = []
    for one in weights:
        if isinstance(one, torch.Tensor):
            tensors.append(one)
        else:
            tensors += module_tensors(one)
            packed += [kernel for module in one.modules() for kernel in packed_kernels(module)]
    foreign = {id(kernel) for module in but.modules() for kernel in packed_kernels(module)}
    return Sleeper(
        device,
        kept=_pieces(_without(tensors, module_tensors(but), pages)),
        kept_kernels=[kernel for kernel in packed if id(kernel) not in foreign],
    )


def _pieces(tensors: Iterable[torch.Tensor]) -> list[Piece]:
    return list(pieces_of(tensors).values())


def _without(
    tensors: Iterable[torch.Tensor], others: Iterable[torch.Tensor], pages: Iterable[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Those of `tensors` that share no memory with `others`, nor a storage with `pages`."""
    taken = {_place(tensor) for tensor in others if tensor.layout is torch.strided}
    storages = {tensor.untyped_storage().data_ptr() for tensor in pages}
    for tensor in tensors:
        if tensor.layout is torch.strided and _place(tensor) not in taken and _place(tensor)[0] not in storages:
            yield tensor


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """What tells memory apart: storages that are resized as a whole, and places in those that are not."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), 0 if storage.resizable() else tensor.data_ptr()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
