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
        self._operators = context.operators

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, size] or [T, H, size] -> the same shape and dtype."""
        return self._operators.rms_norm(x, self.weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(residual + x), residual + x), all [T, size]; without a residual (norm(x), x).

        Both arguments are given up: the results may stand in their memory.
        """
        if residual is None:
            return self(x), x
        return self._operators.add_rms_norm(x, residual, self.weight, self._eps)

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
        self._operators = context.operators

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, size] or [T, H, size] -> the same shape and dtype."""
        return self._operators.rms_norm(x, self.weight, self._eps)

    def expected(self) -> Mapping[str, tuple[int, ...]]:
        """The weight."""
        return {self._name: self._shape}

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Adds 1 in float32; every rank keeps all of it."""
        self.weight.copy_(tensor).add_(1.0)
