"""The score head of a checkpoint: a linear layer from hidden states to labels, read with the model's weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.weights import PackedTensor, TensorInfo

_WEIGHT = "score.weight"
Tensors = Iterable[tuple[str, torch.Tensor | PackedTensor]]


class ScoreHead:
    """Held in float32, whatever the model's dtype: it has few weights, and scores are compared with each other."""

    def __init__(self, num_labels: int, hidden_size: int, device: torch.device):
        self._weight = torch.empty(num_labels, hidden_size, dtype=torch.float32, device=device)

    def sift(self, tensors: Tensors, *, partial: bool = False) -> Iterator[tuple[str, torch.Tensor | PackedTensor]]:
        """Takes the head's weight out of a checkpoint's tensors. Raises `ModelError` where its shape is another, and at
        the end where there was none, unless they are `partial`."""
        is_read = partial
        for name, tensor in tensors:
            if name == _WEIGHT:
                self._read(tensor)
                is_read = True
            else:
                yield name, tensor
        if not is_read:
            raise ModelError(f"the checkpoint lacks {_WEIGHT}, the score head that its architecture has")

    def others(self, infos: Sequence[TensorInfo], *, partial: bool) -> list[TensorInfo]:
        """Those that are not the head's. Raises what `sift` would, and writes nothing."""
        given = [info for info in infos if info.name == _WEIGHT]
        for info in given:
            self._check(info.shape)
        if not given and not partial:
            raise ModelError(f"{_WEIGHT} {list(self._weight.shape)} is missing, the score head of this model")
        return [info for info in infos if info.name != _WEIGHT]

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> float32 [n, num_labels]"""
        return torch.nn.functional.linear(states.float(), self._weight)

    def _read(self, given: torch.Tensor | PackedTensor) -> None:
        tensor = given.dequantized() if isinstance(given, PackedTensor) else given
        self._check(tensor.shape)
        self._weight.copy_(tensor)

    def _check(self, shape: Sequence[int]) -> None:
        if tuple(shape) != tuple(self._weight.shape):
            raise ModelError(f"{_WEIGHT} has shape {list(shape)}, and the config implies {list(self._weight.shape)}")
