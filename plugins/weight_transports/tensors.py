"""Named tensors in memory as an open checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.weights import TensorInfo, WeightReader


class TensorsReader(WeightReader):
    """A bucket whose tensors are there."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], close: Callable[[], None] | None = None):
        """`close`: called once when nobody needs the tensors any more."""
        self._tensors = dict(tensors)
        self._close = close

    def infos(self) -> Sequence[TensorInfo]:
        """In the order of the mapping."""
        return [
            TensorInfo(name, tuple(tensor.shape), dtype_name(tensor.dtype), tensor.numel() * tensor.element_size())
            for name, tensor in self._tensors.items()
        ]

    def read(self, name: str) -> torch.Tensor:
        """The tensor, on the CPU."""
        if name not in self._tensors:
            raise ModelError(f"the bucket has no tensor {name!r}")
        return self._tensors[name].detach().cpu()

    def close(self) -> None:
        """Drops the tensors."""
        self._tensors = {}
        close, self._close = self._close, None
        if close is not None:
            close()


def dtype_name(dtype: torch.dtype) -> str:
    """In torch's spelling: "float32"."""
    return str(dtype).removeprefix("torch.")


def named_dtype(name: object) -> torch.dtype:
    """The dtype that a sender names, with or without "torch.". Raises `ModelError` for what is none."""
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ModelError(f"the sender names a dtype {name!r}, which torch does not know")
    return found
