"""AWQ and GPTQ checkpoints: four-bit weights in groups, packed into 32-bit words in two different ways.

Both store, for a layer of `in` x `out` weights, groups of g weights along `in` with a scale s and a zero point z for
each output feature: w = (q - z) s (AWQ, Lin et al. 2024, section 3; GPTQ, Frantar et al. 2023, section 4). AWQ packs
eight output features into a word, in the order 0, 2, 4, 6, 1, 3, 5, 7; GPTQ packs eight input features, in order, and
stores z - 1. GPTQ with activation order assigns input features to groups by `g_idx`; the weights of such layers are
handed out as numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.weights import PackedTensor, TensorInfo, WeightReader

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word that holds each of eight neighbours."""
_IN_ORDER = tuple(range(8))
_PARTS = (".qweight", ".qzeros", ".scales", ".g_idx")
_HEADER = 4
"""Bytes of a block before its nibbles: scale and zero point, float16 each."""


@dataclass(frozen=True)
class Int4Scheme:
    """What a checkpoint's quantization_config says."""

    method: str
    """"awq" or "gptq"."""
    bits: int
    group_size: int
    """Input features per group; -1: all of them."""
    zero_offset: int
    """What has to be added to the stored zero points."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Int4Scheme:
        """Raises `ModelError` for what this reader does not know."""
        quantization = config["quantization_config"]
        method = str(quantization.get("quant_method"))
        bits = _number(quantization, ("bits", "w_bit"), 4)
        version = str(quantization.get("version", "gemm")).lower()
        if method == "awq" and version != "gemm":
            raise ModelError(f"AWQ checkpoints of version {version!r} cannot be read; convert it to version gemm")
        if bits != 4:
            raise ModelError(f"{method} checkpoints of {bits} bits cannot be read; use one of 4 bits")
        is_first = method == "gptq" and str(quantization.get("checkpoint_format", "gptq")) != "gptq_v2"
        group_size = _number(quantization, ("group_size", "q_group_size"), 128)
        if group_size < 1 and group_size != -1:
            raise ModelError(f"quantization_config.group_size must be 1 or more, or -1 for all, got {group_size}")
        return cls(method, bits, group_size, 1 if is_first else 0)


def _number(quantization: Mapping[str, Any], keys: Sequence[str], default: int) -> int:
    """The first of `keys` that is given. Raises `ModelError` where it is no integer."""
    for key in keys:
        if (value := quantization.get(key)) is not None:
            if not isinstance(value, int) or isinstance(value, bool):
                raise ModelError(f"quantization_config.{key} must be an integer, got {value!r}")
            return value
    return default


class Int4Reader(WeightReader):
    """Another reader whose layers of several tensors come as one weight each."""

    def __init__(self, reader: WeightReader, scheme: Int4Scheme):
        self._reader = reader
        self._scheme = scheme
        stored = {info.name: info for info in reader.infos()}
        self._stored = frozenset(stored)
        self._layers = {name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")}
        self._infos = [
            info for info in stored.values() if not any(info.name == name + part for name, part in self._parts(info))
        ]
        self._infos += [self._info(layer, stored) for layer in sorted(self._layers)]
        self._names = {info.name for info in self._infos}

    def infos(self) -> Sequence[TensorInfo]:
        """One tensor for each layer."""
        return self._infos

    def read(self, name: str) -> torch.Tensor:
        """Dequantized, in float32, where the checkpoint packs it."""
        layer = name.removesuffix(".weight")
        if layer not in self._layers:
            return self._reader.read(name)
        if self._is_ordered(layer):
            return self._packed(layer).dequantized()
        return self._by_index(layer)

    def read_packed(self, name: str) -> torch.Tensor | PackedTensor:
        """In blocks of a group each, but for layers whose groups are scattered."""
        layer = name.removesuffix(".weight")
        if layer not in self._layers:
            return self._reader.read_packed(name)
        return self._packed(layer) if self._is_ordered(layer) else self._by_index(layer)

    def packed_formats(self) -> frozenset[str]:
        """One for each group size."""
        return frozenset(info.dtype for info in self._infos if info.dtype.startswith("int4g"))

    def release(self, name: str) -> None:
        """What the other reader's tensors were read from."""
        layer = name.removesuffix(".weight")
        parts = [layer + part for part in _PARTS] if layer in self._layers else [name]
        for part in parts:
            if part in self._stored:
                self._reader.release(part)

    def files(self) -> Sequence[Path]:
        """Those of the other reader."""
        return self._reader.files()

    def close(self) -> None:
        """Closes the other reader."""
        self._reader.close()

    def _parts(self, info: TensorInfo) -> list[tuple[str, str]]:
        return [
            (info.name.removesuffix(part), part)
            for part in _PARTS
            if info.name.endswith(part) and info.name.removesuffix(part) in self._layers
        ]

    def _info(self, layer: str, stored: Mapping[str, TensorInfo]) -> TensorInfo:
        for part in (".qzeros", ".scales"):
            if layer + part not in stored:
                raise ModelError(f"the checkpoint has {layer}.qweight, but no {layer}{part}")
        rows, columns = stored[f"{layer}.qweight"].shape
        shape = (columns, rows * 8) if self._scheme.method == "gptq" else (columns * 8, rows)
        size = sum(stored[layer + part].num_bytes for part in _PARTS if layer + part in stored)
        return TensorInfo(f"{layer}.weight", shape, f"int4g{self._group_size(shape[1])}", size)

    def _group_size(self, in_features: int) -> int:
        return in_features if self._scheme.group_size < 0 else self._scheme.group_size

    def _is_ordered(self, layer: str) -> bool:
        index = self._group_index(layer)
        if index is None:
            return True
        return bool((index == torch.arange(len(index)) // self._group_size(len(index))).all())

    def _group_index(self, layer: str) -> torch.Tensor | None:
        name = f"{layer}.g_idx"
        return self._reader.read(name) if any(info.name == name for info in self._reader.infos()) else None

    def _values(self, layer: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Four-bit weights uint8 [out, in], zero points and scales float16 [out, groups]."""
        words, scales = self._reader.read(f"{layer}.qweight"), self._reader.read(f"{layer}.scales")
        places = _AWQ_PLACES if self._scheme.method == "awq" else _IN_ORDER
        zeros = unpack_words(self._reader.read(f"{layer}.qzeros"), places).T + self._scheme.zero_offset
        if self._scheme.method == "awq":
            weights = unpack_words(words, places).T
        else:
            weights = unpack_words(words.T.contiguous(), places)
        return weights.contiguous(), zeros.half().contiguous(), scales.T.half().contiguous()

    def _packed(self, layer: str) -> PackedTensor:
        weights, zeros, scales = self._values(layer)
        return pack_groups(layer, weights, zeros, scales, self._group_size(weights.shape[1]))

    def _by_index(self, layer: str) -> torch.Tensor:
        index = self._group_index(layer)
        assert index is not None
        weights, zeros, scales = self._values(layer)
        group = index.long()
        return (weights.float() - zeros.float()[:, group]) * scales.float()[:, group]


def pack_groups(
    layer: str, weights: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, size: int
) -> PackedTensor:
    """Four-bit weights uint8 [out, in] in groups of `size`, zero points and scales float16 [out, groups], in blocks of
    a group each. Raises `ModelError`, naming `layer`, for shapes that do not fit."""
    rows, columns = weights.shape
    if size % 2 or columns % size or scales.shape != (rows, columns // size):
        raise ModelError(f"{layer}: {columns} input features and scales {list(scales.shape)} make no groups of {size}")
    groups = weights.view(rows, -1, size)
    header = torch.stack((scales, zeros), dim=-1).view(torch.uint8)
    nibbles = groups[..., 0::2] | groups[..., 1::2] << 4
    blocks = torch.cat((header, nibbles), dim=-1).view(rows, -1)
    return PackedTensor(
        f"int4g{size}", blocks, (rows, columns), size, _HEADER + size // 2, partial(unpack, group_size=size)
    )


def unpack(blocks: torch.Tensor, group_size: int) -> torch.Tensor:
    """uint8 [rows, n * (4 + group_size / 2)] -> float32 [rows, n * group_size]: scale and zero point in float16, then
    pairs of weights, the first in the low nibble."""
    rows = blocks.shape[0]
    parts = blocks.reshape(rows, -1, _HEADER + group_size // 2)
    header = parts[..., :_HEADER].contiguous().view(torch.float16).float()
    nibbles = parts[..., _HEADER:]
    weights = torch.stack((nibbles & 15, nibbles >> 4), dim=-1).flatten(-2).float()
    return ((weights - header[..., 1:2]) * header[..., 0:1]).view(rows, -1)


def unpack_words(words: torch.Tensor, places: Sequence[int], bits: int = 4) -> torch.Tensor:
    """int32 [r, c] -> uint8 [r, c * len(places)]: of each word the numbers at these places, 0 being the lowest bits."""
    shifts = torch.tensor([bits * place for place in places], dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)
