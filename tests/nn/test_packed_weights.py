"""Packed tensors on their way to blocks: only to those that take them, and never through an expansion."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

import torch

from dovetail.contracts.weights import PackedTensor
from dovetail.nn import WeightHolder, WeightRules, load_weights


class Plain(WeightHolder):
    """Keeps what it is given."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.given: torch.Tensor | PackedTensor | None = None

    def expected(self) -> Mapping[str, tuple[int, ...]]:
        return {self.name: (2, 8)}

    def load(self, name: str, tensor: torch.Tensor | PackedTensor) -> None:
        self.given = tensor


class Packed(Plain):
    """Takes packed tensors as well."""

    takes_packed: ClassVar[bool] = True


def bytes_as_blocks() -> PackedTensor:
    """Blocks of 4 weights that are bytes."""
    return PackedTensor("BYTES", torch.arange(16, dtype=torch.uint8).view(2, 8), (2, 8), 4, 4, lambda raw: raw.float())


def test_only_holders_that_take_packed_tensors_get_them() -> None:
    plain, packed = Plain("a"), Packed("b")
    load_weights(torch.nn.ModuleList([plain, packed]), [("a", bytes_as_blocks()), ("b", bytes_as_blocks())])
    assert isinstance(packed.given, PackedTensor)
    assert isinstance(plain.given, torch.Tensor)
    assert torch.equal(plain.given, torch.arange(16.0).view(2, 8))


def test_an_expansion_is_given_numbers() -> None:
    holder = Packed("a")

    def doubled(match: re.Match[str], tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        return [("a", tensor * 2)]

    load_weights(holder, [("both", bytes_as_blocks())], WeightRules(expanded=(("both", doubled),)))
    assert isinstance(holder.given, torch.Tensor)
    assert torch.equal(holder.given, torch.arange(16.0).view(2, 8) * 2)
