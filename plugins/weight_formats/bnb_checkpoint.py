"""Checkpoints that bitsandbytes wrote: 8 bits with a scale for each row (LLM.int8, Dettmers et al. 2022), and 4 bits in
blocks with a table of values (NF4 and FP4; QLoRA, Dettmers et al. 2023, section 3), whose scales may be quantized in
turn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.weights import TensorInfo
from dovetail.plugins.weight_formats.expanded import Read, StoredWeight

_STATE = ".quant_state.bitsandbytes__"
_INT8_SCALE = 127


def bnb_weights(stored: Mapping[str, TensorInfo], read: Read) -> dict[str, StoredWeight]:
    """`X.weight` with `X.SCB` (8 bits), or with `X.weight.absmax`, `.quant_map` and `.quant_state...` (4 bits)."""
    weights = {}
    for name, info in stored.items():
        row_scales = f"{name.removesuffix('.weight')}.SCB"
        states = [part for part in stored if part.startswith(name + _STATE)]
        if states:
            weights[name] = _four_bits(name, states[0], stored, read)
        elif name.endswith(".weight") and row_scales in stored:
            others = tuple(part for part in (f"{name}_format",) if part in stored)
            expand = partial(_expand_rows, name=name, scales=row_scales)
            weights[name] = StoredWeight((name, row_scales, *others), info.shape, "int8", expand)
    return weights


def _expand_rows(read: Read, name: str, scales: str) -> torch.Tensor:
    return read(name).float() * (read(scales).float() / _INT8_SCALE)[:, None]


def _four_bits(name: str, state_name: str, stored: Mapping[str, TensorInfo], read: Read) -> StoredWeight:
    try:
        state = json.loads(bytes(read(state_name).tolist()))
        shape = tuple(int(size) for size in state["shape"])
        block_size = int(state["blocksize"])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{state_name} is no quantization state of bitsandbytes: {error}") from error
    parts = (name, state_name, *(part for part in _tables(name) if part in stored))
    missing = [part for part in _tables(name)[: 4 if "nested_blocksize" in state else 2] if part not in stored]
    if missing:
        raise ModelError(f"the checkpoint has {name} in 4 bits, but no {', '.join(missing)}")
    expand = partial(_expand_blocks, name=name, state=state, shape=shape, block_size=block_size)
    return StoredWeight(parts, shape, str(state.get("quant_type", "4 bits")), expand)


def _tables(name: str) -> tuple[str, ...]:
    return tuple(f"{name}.{part}" for part in ("absmax", "quant_map", "nested_absmax", "nested_quant_map"))


def _expand_blocks(
    read: Read, name: str, state: Mapping[str, Any], shape: tuple[int, ...], block_size: int
) -> torch.Tensor:
    absmax_name, table_name, nested_name, nested_table = _tables(name)
    absmax = read(absmax_name)
    if "nested_blocksize" in state:
        outer = read(nested_name).float().repeat_interleave(int(state["nested_blocksize"]))[: absmax.numel()]
        absmax = read(nested_table).float()[absmax.long()] * outer + float(state["nested_offset"])
    packed = read(name).view(torch.uint8).flatten()
    numbers = read(table_name).float()[torch.stack((packed >> 4, packed & 15), dim=-1).long()].flatten()
    scales = absmax.float().repeat_interleave(block_size)
    size = prod(shape)
    return (numbers[:size] * scales[:size]).view(shape)
