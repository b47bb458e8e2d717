import torch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dovetail.nn import LowRank


@dataclass(frozen=True, eq=False)
class LowRankCase:
    y: torch.Tensor
    x: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    part_starts: torch.Tensor
    ranks: torch.Tensor
    slots: torch.Tensor
    @property
    def arguments(self) -> tuple[torch.Tensor, ...]: ...
    def only(self, rows: slice) -> LowRankCase: ...
    def to(self, dtype: torch.dtype, device: str) -> LowRankCase: ...
    def expected(self) -> tuple[torch.Tensor, torch.Tensor]: ...

def random_low_rank(
    slots: Sequence[int],
    in_features: int,
    parts: Sequence[int],
    ranks: Sequence[int],
    max_rank: int,
) -> LowRankCase: ...
def random_adapter(
    shapes: Mapping[str, tuple[int, ...]],
    rank: int,
    seed: int,
) -> dict[str, LowRank]: ...
def merged(
    weights: Mapping[str, torch.Tensor],
    adapter: Mapping[str, LowRank],
) -> dict[str, torch.Tensor]: ...
