"""What the suite of weight transports finds: each a change in a transport that passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

import pytest
import torch

from dovetail.contracts.errors import RequestError
from dovetail.contracts.weight_transport import WeightTransport, WeightTransportCapabilities
from dovetail.contracts.weights import TensorInfo, WeightReader
from dovetail.testing.faults import Fault, check_fault
from dovetail.testing.transport_suite import WeightSender, WeightTransportSuite

Tensors = Mapping[str, torch.Tensor]
SHELVES: dict[str, list[Tensors]] = {}


class Shelf(WeightSender):
    """Puts buckets on a shelf of this process."""

    def __init__(self, folder: Path):
        self._name = str(folder)
        SHELVES[self._name] = []

    def connect(self, num_ranks: int) -> Mapping[str, Any]:
        return {"shelf": self._name}

    def send(self, tensors: Tensors) -> Mapping[str, Any]:
        SHELVES[self._name].append(tensors)
        return {"bucket": len(SHELVES[self._name]) - 1}

    def close(self) -> None:
        SHELVES.pop(self._name, None)


class ShelfReader(WeightReader):
    def __init__(self, tensors: Tensors):
        self.tensors_by_name = dict(tensors)

    def infos(self) -> Sequence[TensorInfo]:
        return [
            TensorInfo(name, tuple(one.shape), str(one.dtype).removeprefix("torch."), one.nbytes)
            for name, one in self.tensors_by_name.items()
        ]

    def read(self, name: str) -> torch.Tensor:
        return self.tensors_by_name[name]


class FromShelf(WeightTransport):
    contract = (1, 0)
    capabilities = WeightTransportCapabilities(device_types=None, tensor_parallel=None, keeps_tensors=True)
    reader: ClassVar[type[ShelfReader]] = ShelfReader

    def connect(self, init_info: Mapping[str, Any]) -> None:
        if set(init_info) != {"shelf"}:
            raise RequestError(f"init_info names a shelf, got {dict(init_info)}")
        self._shelf = SHELVES[init_info["shelf"]]

    def receive(self, update_info: Mapping[str, Any]) -> WeightReader:
        if set(update_info) != {"bucket"}:
            raise RequestError(f"update_info names a bucket, got {dict(update_info)}")
        return self.reader(self.changed(self._shelf[update_info["bucket"]]))

    def changed(self, tensors: Tensors) -> Tensors:
        return tensors


class ShelfSuite(WeightTransportSuite):
    plugin = FromShelf
    create_sender = Shelf


class TestShelf(ShelfSuite):
    pass


class LosesOne(FromShelf):
    def changed(self, tensors: Tensors) -> Tensors:
        return dict(list(tensors.items())[:-1])


class Renames(FromShelf):
    def changed(self, tensors: Tensors) -> Tensors:
        return {name.removesuffix(".weight"): tensor for name, tensor in tensors.items()}


class RoundsAll(FromShelf):
    def changed(self, tensors: Tensors) -> Tensors:
        return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


class Flattens(FromShelf):
    def changed(self, tensors: Tensors) -> Tensors:
        return {name: tensor.reshape(-1) for name, tensor in tensors.items()}


class CutsTheEnd(FromShelf):
    def changed(self, tensors: Tensors) -> Tensors:
        cut = {name: tensor.clone() for name, tensor in tensors.items()}
        for tensor in cut.values():
            tensor.view(-1)[-1] = 0
        return cut


class BringsTheFirstAgain(FromShelf):
    def changed(self, tensors: Tensors) -> Tensors:
        return self._shelf[0]


class OneBuffer(FromShelf):
    """Each bucket lies where the one before was."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._memory = torch.empty(1 << 20, dtype=torch.uint8)

    def changed(self, tensors: Tensors) -> Tensors:
        views, start = {}, 0
        for name, tensor in tensors.items():
            view = self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            views[name] = view.copy_(tensor)
            start += (tensor.nbytes + 63) // 64 * 64
        return views


class OnceOnly(FromShelf):
    """The first rank takes the bucket away."""

    lock: ClassVar[Lock] = Lock()

    def changed(self, tensors: Tensors) -> Tensors:
        if self.setup.num_ranks == 1:
            return tensors
        with self.lock:
            index = next(i for i, one in enumerate(self._shelf) if one is tensors)
            self._shelf[index] = {}
        return tensors


class TakesAnything(FromShelf):
    def receive(self, update_info: Mapping[str, Any]) -> WeightReader:
        return ShelfReader(self._shelf[update_info.get("bucket", -1)] if self._shelf else {})


class ConnectsToAnything(FromShelf):
    def connect(self, init_info: Mapping[str, Any]) -> None:
        self._shelf = SHELVES.get(init_info.get("shelf", ""), [])


class ClosesOnce(FromShelf):
    def close(self) -> None:
        del self._shelf


class MeasuresElements(ShelfReader):
    def infos(self) -> Sequence[TensorInfo]:
        return [replace(info, num_bytes=self.read(info.name).numel()) for info in super().infos()]


class CountsElements(FromShelf):
    reader = MeasuresElements


FAULTS = [
    Fault("loses a tensor", LosesOne, "test_brings_what_was_sent"),
    Fault("renames tensors", Renames, "test_brings_what_was_sent"),
    Fault("rounds what it brings", RoundsAll, "test_brings_what_was_sent"),
    Fault("flattens tensors", Flattens, "test_brings_what_was_sent"),
    Fault("cuts the end off", CutsTheEnd, "test_brings_what_was_sent"),
    Fault("counts elements for bytes", CountsElements, "test_brings_what_was_sent"),
    Fault("brings the first bucket again", BringsTheFirstAgain, "test_buckets_follow_each_other"),
    Fault("says that it keeps tensors and overwrites them", OneBuffer, "test_keeps_what_it_says_it_keeps"),
    Fault("gives a bucket to one rank", OnceOnly, "test_reaches_every_rank"),
    Fault("takes keys that it does not know", TakesAnything, "test_refuses_what_it_cannot_use"),
    Fault("connects to anything", ConnectsToAnything, "test_refuses_odd_ways_to_connect"),
    Fault("cannot be closed twice", ClosesOnce, "test_close_comes_any_number_of_times"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_finds_a_transport_that(fault: Fault) -> None:
    check_fault(fault, ShelfSuite, plugin=fault.plugin)
