"""Checkpoints whose weights are small numbers times scales: fp8 as DeepSeek and Qwen have it, and compressed-tensors.

A weight w[i, j] is q[i, j] s, with one scale s for the whole tensor, for each row, for groups of a row, or for each
block of rows and columns: the shape of the stored scales says which. compressed-tensors' `pack-quantized` stores
q + 2^(bits - 1) in words of 32 bits, the first in the lowest bits.

Checkpoints may also say how to round activations. That is not done here: products with more exact activations are
closer to those of the unquantized model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.weights import PackedTensor, TensorInfo
from dovetail.plugins.weight_formats.expanded import Read, Scheme, StoredWeight
from dovetail.plugins.weight_formats.int4_checkpoint import pack_groups, unpack_words

_SCALES = (".weight_scale", ".weight_scale_inv")
"""Spellings of one thing: DeepSeek's name says inverse, and is a factor all the same."""
_OTHERS = (".input_scale", ".activation_scale", ".input_zero_point", ".output_scale")
"""How activations are rounded, which is not done here."""
_PLAIN_FORMATS = ("dense", "naive-quantized", "float-quantized", "int-quantized")
_PACKED_FORMAT = "pack-quantized"


def fp8_scheme(quantization: Mapping[str, Any]) -> Scheme:
    """`quant_method: fp8`, with or without weight_block_size."""
    block = _block(quantization.get("weight_block_size"), "weight_block_size")
    return partial(_scaled_weights, block=block)


def _block(value: Any, key: str) -> tuple[int, int] | None:
    """Rows and columns of a block, None where there are none. Raises `ModelError` for anything else."""
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value):
        return value[0], value[1]
    raise ModelError(f"quantization_config.{key} must be two integers above 0, got {value!r}")


def _mapping(value: Any, key: str) -> Mapping[str, Any]:
    """The mapping at `key`, empty for null. Raises `ModelError` for what is no mapping."""
    if value is not None and not isinstance(value, Mapping):
        raise ModelError(f"quantization_config.{key} must be a mapping, got {value!r}")
    return value or {}


def compressed_tensors_scheme(quantization: Mapping[str, Any]) -> Scheme:
    """`quant_method: compressed-tensors`. Raises `ModelError` for a format that this reader does not know."""
    sparsity = _mapping(quantization.get("sparsity_config"), "sparsity_config").get("format", "dense")
    given = _mapping(quantization.get("config_groups"), "config_groups")
    groups = [_mapping(group, f"config_groups.{name}") for name, group in given.items()]
    formats = {str(quantization.get("format", "dense")), *(str(g["format"]) for g in groups if g.get("format"))}
    formats.discard("mixed-precision")
    known = {*_PLAIN_FORMATS, _PACKED_FORMAT}
    if sparsity != "dense" or not formats <= known:
        found = sparsity if sparsity != "dense" else ", ".join(sorted(formats - known))
        raise ModelError(
            f"compressed-tensors checkpoints of format {found} cannot be read, only {', '.join(sorted(known))}; "
            "use the unquantized checkpoint (model.quantization quantizes it at load)"
        )
    weights = [_mapping(group.get("weights"), "config_groups.weights") for group in groups]
    blocks = [_block(each.get("block_structure"), "config_groups.weights.block_structure") for each in weights]
    block = next((found for found in blocks if found), None)

    def scheme(stored: Mapping[str, TensorInfo], read: Read) -> Mapping[str, StoredWeight]:
        return {**_scaled_weights(stored, read, block), **_packed_weights(stored, read)}

    return scheme


def _scaled_weights(
    stored: Mapping[str, TensorInfo], read: Read, block: tuple[int, int] | None
) -> dict[str, StoredWeight]:
    weights = {}
    for name in stored:
        layer, dot, last = name.rpartition(".")
        scale = next((layer + ending for ending in _SCALES if layer + ending in stored), None)
        if not dot or last != "weight" or scale is None:
            continue
        zero = f"{layer}.weight_zero_point"
        zeros = (zero,) if zero in stored else ()
        others = tuple(layer + ending for ending in _OTHERS if layer + ending in stored)
        info = stored[name]
        expand = partial(_scaled, name=name, scale=scale, zero=zero if zeros else None, block=block)
        weights[name] = StoredWeight((name, scale, *zeros, *others), info.shape, info.dtype, expand)
    return weights


def _scaled(read: Read, name: str, scale: str, zero: str | None, block: tuple[int, int] | None) -> torch.Tensor:
    numbers = read(name).float()
    if zero is not None:
        numbers = numbers - _spread(read(zero).float(), numbers.shape, block, zero)
    return numbers * _spread(read(scale).float(), numbers.shape, block, scale)


def _spread(scales: torch.Tensor, shape: torch.Size, block: tuple[int, int] | None, name: str) -> torch.Tensor:
    """Scales so that they broadcast over a weight of `shape`. Raises `ModelError` where they do not fit."""
    rows, columns = shape[-2], shape[-1]
    if scales.numel() == 1:
        return scales.reshape(1, 1)
    if scales.dim() == 1:
        scales = scales[:, None]
    if block is None or scales.shape[-1] == 1:
        # Rows alone, or groups of a row.
        if scales.shape[-2] == rows and columns % scales.shape[-1] == 0:
            return scales.repeat_interleave(columns // scales.shape[-1], dim=-1)
    elif scales.shape[-2] == -(-rows // block[0]) and scales.shape[-1] == -(-columns // block[1]):
        # The last block of rows or of columns may be cut off.
        whole = scales.repeat_interleave(block[0], dim=-2).repeat_interleave(block[1], dim=-1)
        return whole[..., :rows, :columns]
    raise ModelError(f"{name} has shape {list(scales.shape)}, which does not fit a weight of {list(shape)}")


def _packed_weights(stored: Mapping[str, TensorInfo], read: Read) -> dict[str, StoredWeight]:
    weights = {}
    for name in stored:
        layer = name.removesuffix(".weight_packed")
        if layer == name:
            continue
        endings = (".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx")
        parts = {ending: layer + ending for ending in endings if layer + ending in stored}
        for needed in (".weight_scale", ".weight_shape"):
            if needed not in parts:
                raise ModelError(f"the checkpoint has {name}, but no {layer}{needed}")
        if ".weight_g_idx" in parts:
            raise ModelError(f"{layer}: compressed-tensors with activation order cannot be read; convert it without")
        weights[f"{layer}.weight"] = _packed_weight(layer, parts, stored, read)
    return weights


def _packed_weight(layer: str, parts: Mapping[str, str], stored: Mapping[str, TensorInfo], read: Read) -> StoredWeight:
    name = f"{layer}.weight_packed"
    rows, columns = map(int, read(parts[".weight_shape"]).tolist())
    num_groups = stored[parts[".weight_scale"]].shape[-1]
    bits, left = divmod(32 * stored[name].shape[-1], columns)
    if left or bits not in (4, 8) or columns % num_groups:
        raise ModelError(
            f"{layer}: weights [{rows}, {columns}] in {stored[name].shape[-1]} words a row and {num_groups} groups "
            "cannot be read; only whole words of 4 or 8 bits and whole groups can"
        )
    size = columns // num_groups

    def groups(read: Read) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Numbers uint8 [rows, columns], zero points uint8 and scales [rows, num_groups]."""
        numbers = unpack_words(read(name), range(32 // bits), bits)
        if ".weight_zero_point" in parts:
            # Packed along the rows, of which the last word may have some that are none.
            words = read(parts[".weight_zero_point"]).T.contiguous()
            zeros = unpack_words(words, range(32 // bits), bits)[:, :rows].T.contiguous()
        else:
            zeros = torch.full((rows, num_groups), 1 << (bits - 1), dtype=torch.uint8)
        return numbers, zeros, read(parts[".weight_scale"])

    def expand(read: Read) -> torch.Tensor:
        numbers, zeros, scales = groups(read)
        grouped = numbers.view(rows, num_groups, size).float() - zeros.float()[..., None]
        return (grouped * scales.float()[..., None]).view(rows, columns)

    def packed(read: Read) -> torch.Tensor | PackedTensor:
        numbers, zeros, scales = groups(read)
        half = scales.half()
        if not torch.equal(half.float(), scales.float()):
            return expand(read)  # the blocks hold scales in float16
        return pack_groups(layer, numbers, zeros.half(), half, size)

    shape = (rows, columns)
    if bits != 4:
        return StoredWeight((name, *parts.values()), shape, "int8", expand)
    return StoredWeight((name, *parts.values()), shape, f"int4g{size}", expand, packed)
