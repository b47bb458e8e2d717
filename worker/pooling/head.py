"""The score head of a checkpoint: a linear layer from hidden states to labels, read with the model's weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.weights import PackedTensor

_WEIGHT = "score.weight"
Tensors = Iterable[tuple[str, torch.Tensor | PackedTensor]]


class ScoreHead:
    """Held in float32, whatever the model's dtype: it has few weights, and scores are compared with each other."""

    def __init__(self, num_labels: int, hidden_size: int, device: torch.device):
        self._weight = torch.empty(num_labels, hidden_size, dtype=torch.float32, device=device)
        self._is_read = False

    def sift(self, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor | PackedTensor]]:
        """Takes the head's weight out of a checkpoint's tensors. Raises `ModelError` where its shape is another, and at
        the end where there was none."""
        self._is_read = False
        for name, tensor in tensors:
            if name == _WEIGHT:
                self._read(tensor)
            else:
                yield name, tensor
        if not self._is_read:
            raise ModelError(f"the checkpoint lacks {_WEIGHT}, the score head that its architecture has")

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> float32 [n, num_labels]"""
        return torch.nn.functional.linear(states.float(), self._weight)

    def _read(self, given: torch.Tensor | PackedTensor) -> None:
        tensor = given.dequantized() if isinstance(given, PackedTensor) else given
        if tensor.shape != self._weight.shape:
            raise ModelError(
                f"{_WEIGHT} has shape {list(tensor.shape)}, and the config implies {list(self._weight.shape)}"
            )
        self._weight.copy_(tensor)
        self._is_read = True
