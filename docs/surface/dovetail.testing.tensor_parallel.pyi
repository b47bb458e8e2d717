import torch
from collections.abc import Sequence
from dataclasses import dataclass
from dovetail.contracts.attention import AttentionBackend
from dovetail.contracts.model import ModelFamily
from pathlib import Path


@dataclass(frozen=True)
class RankResult:
    rank: int
    logits: torch.Tensor
    tokens: list[int]

def run_over_ranks(
    cases: Sequence[tuple[type[ModelFamily], Path]],
    backend_class: type[AttentionBackend],
    prompt: Sequence[int],
    num_tokens: int,
    tensor_parallel: int = 2,
    dtype: torch.dtype = torch.float32,
) -> list[list[RankResult]]: ...
