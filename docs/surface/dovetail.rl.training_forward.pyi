import torch
from collections.abc import Iterable, Mapping, Sequence
from dovetail.config.layers import LayeredConfig
from dovetail.config.resolved import ResolvedConfig
from pathlib import Path
from typing import Any, Self

Scored = tuple[Sequence[int], Sequence[int]]

class TrainingForward:
    def __init__(self, config: ResolvedConfig): ...
    @classmethod
    def from_config(
        cls,
        config: str | Path | Mapping[str, Any] | LayeredConfig | None = None,
        *,
        options: Iterable[str] = (),
        **keywords: Any,
    ) -> Self: ...
    def load(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None: ...
    def log_probs(
        self,
        sequences: Iterable[Scored],
        *,
        temperature: float = 1.0,
    ) -> list[torch.Tensor]: ...
