"""Named tensors in memory as an open checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.weights import TensorInfo, WeightReader


class TensorsReader(WeightReader):
    """A bucket whose tensors are there."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._tensors = dict(tensors)

    def infos(self) -> Sequence[TensorInfo]:
        """In the order of the mapping."""
        return [
            TensorInfo(
                name,
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
                tensor.numel() * tensor.element_size(),
            )
            for name, tensor in self._tensors.items()
        ]

    def read(self, name: str) -> torch.Tensor:
        """The tensor, on the CPU."""
        if name not in self._tensors:
            raise ModelError(f"the bucket has no tensor {name!r}")
        tensor = self._tensors[name]
        if tensor.is_meta or tensor.layout != torch.strided:
            kind = "on the meta device, where it has no values" if tensor.is_meta else f"of layout {tensor.layout}"
            raise ModelError(f"{name} is {kind}: send dense tensors with values")
        return tensor.detach().cpu()

    def close(self) -> None:
        """Drops the tensors."""
        self._tensors = {}
