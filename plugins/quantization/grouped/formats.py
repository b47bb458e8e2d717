"""How weights stand in groups: integers of 4 to 8 bits with a scale, and perhaps a minimum, per 16 or 32 of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dovetail.contracts.weights import PackedTensor


@dataclass(frozen=True)
class GroupFormat:
    """w = scale * (q - zero), or scale * q + minimum."""

    bits: int
    group: int
    """Weights under one scale, along the input features."""
    has_min: bool
    zero: int = 0
    """What q stands for a weight of 0; only without minimums."""

    def bytes_per_weight(self) -> float:
        """With float16 scales and minimums."""
        return self.bits / 8 + (2 + 2 * self.has_min) / self.group


@dataclass(frozen=True)
class Groups:
    """Rows of weights in groups."""

    format: GroupFormat
    values: torch.Tensor
    """uint8 [rows, columns]; the bits of int8 where there are 8."""
    scales: torch.Tensor
    """float16 [rows, columns / group]."""
    minimums: torch.Tensor | None
    """float16 [rows, columns / group]."""


EIGHT = GroupFormat(8, 32, has_min=False)
FOUR = GroupFormat(4, 32, has_min=True)
_FOUR_CENTRED = GroupFormat(4, 32, has_min=False, zero=8)
_FIVE = GroupFormat(5, 32, has_min=True)
_FIVE_CENTRED = GroupFormat(5, 32, has_min=False, zero=16)
_SIX = GroupFormat(6, 16, has_min=False, zero=32)


def groups_of(packed: PackedTensor) -> Groups:
    """The same weights, block by block: integers are kept as they are, and so are float16 scales. K-quants have scales
    that are a float16 times a small integer; the product is rounded to float16, off by one part in 2048 at most
    (where it is below 2^-14: by 2^-25)."""
    rows, columns = packed.shape
    blocks = packed.blocks.contiguous().view(rows * columns // packed.block_size, packed.block_bytes)
    groups = _READERS[packed.format][1](blocks)
    minimums = groups.minimums
    return Groups(
        groups.format,
        groups.values.reshape(rows, columns),
        groups.scales.reshape(rows, -1),
        None if minimums is None else minimums.reshape(rows, -1),
    )


def _halves(blocks: torch.Tensor, start: int, count: int = 1) -> torch.Tensor:
    """float16 [n, count] at byte `start` of each block."""
    return blocks[:, start : start + 2 * count].contiguous().view(torch.float16)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Low halves, then high halves, along the last dimension."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 4], a little-endian word -> [n, 32], its bits in the place of the fifth."""
    return ((packed[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1) << 4


def _q4_0(blocks: torch.Tensor) -> Groups:
    return Groups(_FOUR_CENTRED, _nibbles(blocks[:, 2:]), _halves(blocks, 0), None)


def _q4_1(blocks: torch.Tensor) -> Groups:
    return Groups(FOUR, _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> Groups:
    values = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return Groups(_FIVE_CENTRED, values, _halves(blocks, 0), None)


def _q5_1(blocks: torch.Tensor) -> Groups:
    values = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return Groups(_FIVE, values, _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> Groups:
    return Groups(EIGHT, blocks[:, 2:], _halves(blocks, 0), None)


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minimums of the eight groups of a 256-block whose header is d, dmin and twelve bytes of 6-bit
    numbers: float16 [n, 8] each."""
    packed = blocks[:, 4:16]
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), dim=1)
    minimums = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), dim=1)
    d, dmin = _halves(blocks, 0).float(), _halves(blocks, 2).float()
    return (d * scales).half(), (-dmin * minimums).half()


def _q4_k(blocks: torch.Tensor) -> Groups:
    values = _nibbles(blocks[:, 16:].view(-1, 4, 32)).flatten(1)
    return Groups(FOUR, values, *_k_scales(blocks))


def _q5_k(blocks: torch.Tensor) -> Groups:
    low = _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32)
    high = (blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    return Groups(_FIVE, (low | high << 4).flatten(1), *_k_scales(blocks))


def _q6_k(blocks: torch.Tensor) -> Groups:
    low = _nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
    high = blocks[:, 128:192].view(-1, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    scales = blocks[:, 192:208].contiguous().view(torch.int8) * _halves(blocks, 208).float()
    return Groups(_SIX, (low | high << 4).flatten(1), scales.half(), None)


_READERS: dict[str, tuple[GroupFormat, Callable[[torch.Tensor], Groups]]] = {
    "Q4_0": (_FOUR_CENTRED, _q4_0),
    "Q4_1": (FOUR, _q4_1),
    "Q5_0": (_FIVE_CENTRED, _q5_0),
    "Q5_1": (_FIVE, _q5_1),
    "Q8_0": (EIGHT, _q8_0),
    "Q4_K": (FOUR, _q4_k),
    "Q5_K": (_FIVE, _q5_k),
    "Q6_K": (_SIX, _q6_k),
}

GROUP_FORMATS = {name: form for name, (form, _) in _READERS.items()}
"""What `groups_of` makes of each of GGUF's formats that it reads."""

PACKED_FORMATS = frozenset(_READERS)
"""GGUF's names of the formats that `groups_of` reads."""
