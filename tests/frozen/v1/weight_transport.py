"""Tensors that wait under a name in this process."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dovetail.contracts.errors import RequestError
from dovetail.contracts.weight_transport import WeightTransport, WeightTransportCapabilities
from dovetail.contracts.weights import TensorInfo, WeightReader

SHELF: dict[str, Mapping[str, torch.Tensor]] = {}


class Reader(WeightReader):
    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._tensors = tensors

    def infos(self) -> Sequence[TensorInfo]:
        return [
            TensorInfo(name, tuple(tensor.shape), str(tensor.dtype).partition(".")[2], tensor.nbytes)
            for name, tensor in self._tensors.items()
        ]

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]


class Frozen(WeightTransport):
    contract = (1, 0)
    capabilities = WeightTransportCapabilities(device_types=frozenset({"cpu"}), keeps_tensors=True)

    def connect(self, init_info: Mapping[str, Any]) -> None:
        if set(init_info) != {"shelf"}:
            raise RequestError(f"init_info names a shelf, got {init_info}")
        self._shelf = init_info["shelf"]

    def receive(self, update_info: Mapping[str, Any]) -> WeightReader:
        if set(update_info) != {"bucket"}:
            raise RequestError(f"update_info names a bucket, got {update_info}")
        return Reader(SHELF[f"{self._shelf}/{update_info['bucket']}"])
