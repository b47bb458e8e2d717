"""gpt-oss: experts in MXFP4, four-bit floats in blocks of 32 that share a power of two (OCP Microscaling Formats 1.0,
sections 5.3 and 6.3)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.weights import TensorInfo
from dovetail.plugins.weight_formats.expanded import Read, StoredWeight

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BIAS = 127


def mxfp4_weights(stored: Mapping[str, TensorInfo], read: Read) -> dict[str, StoredWeight]:
    """Each `X_blocks` uint8 [experts, rows, groups, 16] with its `X_scales` uint8 [experts, rows, groups] as X
    [experts, columns, rows], which is how the model's own experts lie."""
    weights = {}
    for name, info in stored.items():
        weight = name.removesuffix("_blocks")
        if weight == name:
            continue
        scales = f"{weight}_scales"
        if scales not in stored:
            raise ModelError(f"the checkpoint has {name}, but no {scales}")
        experts, rows, groups, half = info.shape
        shape = (experts, groups * half * 2, rows)
        expand = partial(_expand, blocks=name, scales=scales)
        weights[weight] = StoredWeight((name, scales), shape, "mxfp4", expand)
    return weights


def _expand(read: Read, blocks: str, scales: str) -> torch.Tensor:
    packed = read(blocks)
    numbers = torch.tensor(_E2M1)[torch.stack((packed & 15, packed >> 4), dim=-1).long()].flatten(-2)
    exponents = read(scales).to(torch.int32) - _BIAS
    values = torch.ldexp(numbers, exponents[..., None])
    return values.flatten(-2).transpose(-1, -2).contiguous()
