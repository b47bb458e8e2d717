"""Low-rank adapters: for `AddsLowRank.add_low_rank`, with the expected results, and for whole models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dovetail.nn import LowRank


@dataclass(frozen=True, eq=False)
class LowRankCase:
    """Arguments of `AddsLowRank.add_low_rank`."""

    y: torch.Tensor
    x: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    part_starts: torch.Tensor
    ranks: torch.Tensor
    slots: torch.Tensor

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """In order, but with a copy of y."""
        return self.y.clone(), self.x, self.a, self.b, self.part_starts, self.ranks, self.slots

    def only(self, rows: slice) -> LowRankCase:
        """Some of the rows."""
        return replace(self, y=self.y[rows], x=self.x[rows], slots=self.slots[rows])

    def to(self, dtype: torch.dtype, device: str) -> LowRankCase:
        """A copy, with numbers of another dtype, on another device."""
        wide = {name: getattr(self, name).to(device, dtype, copy=True) for name in ("y", "x", "a", "b")}
        places = {name: getattr(self, name).to(device) for name in ("part_starts", "ranks", "slots")}
        return LowRankCase(**wide, **places)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The contract's words in float64, and the sum of the magnitudes of what is added."""
        y, x, a, b = (tensor.double() for tensor in (self.y, self.x, self.a, self.b))
        total, magnitude = y.clone(), y.abs()
        starts = self.part_starts.tolist()
        for row, slot in enumerate(self.slots.tolist()):
            rank = int(self.ranks[slot]) if slot >= 0 else 0
            for part in range(len(starts) - 1):
                columns = slice(starts[part], starts[part + 1])
                own, out = a[slot, part, :rank], b[slot, :rank, columns]
                total[row, columns] += (own @ x[row]) @ out
                magnitude[row, columns] += (own.abs() @ x[row].abs()) @ out.abs()
        return total, magnitude


def random_low_rank(
    slots: Sequence[int], in_features: int, parts: Sequence[int], ranks: Sequence[int], max_rank: int
) -> LowRankCase:
    """Random float64 numbers, the same for the same sizes; `parts` are the columns of each, `ranks` those of the
    slots."""
    drawn = torch.Generator().manual_seed(len(slots) + in_features + sum(parts))
    rows, num_slots, out_features = len(slots), len(ranks), sum(parts)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=drawn, dtype=torch.float64)

    a, b = normal(num_slots, len(parts), max_rank, in_features), normal(num_slots, max_rank, out_features)
    for slot, rank in enumerate(ranks):
        a[slot, :, rank:] = 0
        b[slot, rank:] = 0
    return LowRankCase(
        y=normal(rows, out_features),
        x=normal(rows, in_features),
        a=a / in_features**0.5,
        b=b,
        part_starts=torch.tensor([0, *parts]).cumsum(0).int(),
        ranks=torch.tensor(ranks, dtype=torch.int32),
        slots=torch.tensor(slots, dtype=torch.int32),
    )


def random_adapter(shapes: Mapping[str, tuple[int, ...]], rank: int, seed: int) -> dict[str, LowRank]:
    """For layers of these (out_features, in_features) by name."""
    drawn = torch.Generator().manual_seed(seed)
    return {
        name: LowRank(
            torch.randn(rank, columns, generator=drawn) / columns**0.5,
            torch.randn(rows, rank, generator=drawn) / rank**0.5,
            scale=0.25,
        )
        for name, (rows, columns) in shapes.items()
    }


def merged(weights: Mapping[str, torch.Tensor], adapter: Mapping[str, LowRank]) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors with an adapter in them."""
    changed = dict(weights)
    for name, layer in adapter.items():
        changed[f"{name}.weight"] = weights[f"{name}.weight"] + layer.scale * layer.b @ layer.a
    return changed
