"""Normalisation."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dovetail.nn.context import ModelContext
from dovetail.nn.loading import WeightHolder


class RMSNorm(WeightHolder):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019)."""

    def __init__(self, context: ModelContext, name: str, size: int, eps: float):
        super().__init__()
        self.weight = context.empty(size)
        self._name = f"{name}.weight"
        self._shape = (size,)
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> the same shape and dtype."""
        return torch.nn.functional.rms_norm(x, self._shape, self.weight, self._eps)

    def expected(self) -> Mapping[str, tuple[int, ...]]:
        """The weight."""
        return {self._name: self._shape}

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Every rank keeps all of it."""
        self.weight.copy_(tensor)


class OffsetRMSNorm(WeightHolder):
    """RMSNorm whose checkpoint stores the weight's difference from 1, multiplied in float32 (Gemma)."""

    def __init__(self, context: ModelContext, name: str, size: int, eps: float):
        super().__init__()
        self.weight = context.empty(size, dtype=torch.float32)
        """The factor itself, 1 added, in float32 whatever the model's dtype."""
        self._name = f"{name}.weight"
        self._shape = (size,)
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> the same shape and dtype."""
        return torch.nn.functional.rms_norm(x.float(), self._shape, self.weight, self._eps).to(x.dtype)

    def expected(self) -> Mapping[str, tuple[int, ...]]:
        """The weight."""
        return {self._name: self._shape}

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Adds 1 in float32; every rank keeps all of it."""
        self.weight.copy_(tensor).add_(1.0)
