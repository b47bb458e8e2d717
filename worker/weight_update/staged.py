"""The buckets of an update that arrived, until the weights are written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b

import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.weights import PackedTensor, TensorInfo, WeightReader

Weight = torch.Tensor | PackedTensor
CHECKSUM_BYTES = 16


class StagedWeights:
    """What one module gets in one update. Names come once."""

    def __init__(self, packed_formats: frozenset[str], *, copies: bool):
        """`packed_formats`: those in which tensors may stay packed. `copies`: whether buckets are copied when they
        arrive; otherwise their readers stay open, and tensors are read when they are wanted."""
        self._packed_formats = packed_formats
        self._copies = copies
        self._infos: dict[str, TensorInfo] = {}
        self._tensors: dict[str, Weight] = {}
        self._readers: list[WeightReader] = []

    @property
    def infos(self) -> Sequence[TensorInfo]:
        """Of all tensors so far."""
        return list(self._infos.values())

    def add(self, bucket: WeightReader) -> None:
        """Takes a bucket, and closes it sooner or later. Raises `ModelError` for a name that came before, and for
        tensors that are not what the bucket announces."""
        try:
            for info in bucket.infos():
                if info.name in self._infos:
                    raise ModelError(f"{info.name} came twice in one update")
                self._infos[info.name] = info
            if self._copies:
                self._copy(bucket)
        except BaseException:
            bucket.close()
            raise
        if self._copies:
            bucket.close()
        else:
            self._readers.append(bucket)

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """All pairs, in the order in which they came."""
        yield from self._tensors.items()
        for reader in self._readers:
            yield from reader.tensors(self._packed_formats)

    def digests(self) -> Iterator[tuple[str, str]]:
        """A line for each tensor: its name, and the hash of name, dtype, shape and values. Raises `ModelError` at the
        end where some have values that are not finite."""
        damaged = []
        for name, weight in self.tensors():
            yield name, _digest(name, weight)
            if not _is_finite(weight):
                damaged.append(name)
        if damaged:
            more = f", and {len(damaged) - 12} more" if len(damaged) > 12 else ""
            raise ModelError(f"weights are NaN or infinite: {', '.join(damaged[:12])}{more}")

    def close(self) -> None:
        """Lets go of everything. Idempotent."""
        self._tensors.clear()
        readers, self._readers = self._readers, []
        for reader in readers:
            reader.close()

    def _copy(self, bucket: WeightReader) -> None:
        for name, weight in bucket.tensors(self._packed_formats):
            announced = self._infos[name].shape
            if tuple(weight.shape) != announced:
                raise ModelError(f"{name} was announced with shape {list(announced)} and has {list(weight.shape)}")
            self._tensors[name] = _copied(weight)


def checksum_of(digests: Iterator[tuple[str, str]], before: str) -> str:
    """One hash of all tensors, whatever the order in which they came. `before`: the checksum of the weights that a
    partial update changes; empty otherwise."""
    lines = "\n".join(line for _, line in sorted(digests))
    return blake2b(f"{before}\n{lines}".encode(), digest_size=CHECKSUM_BYTES).hexdigest()


def _copied(weight: Weight) -> Weight:
    if isinstance(weight, PackedTensor):
        return replace(weight, blocks=weight.blocks.clone())
    return weight.detach().to("cpu", copy=True).contiguous()


def _digest(name: str, weight: Weight) -> str:
    values = weight.blocks if isinstance(weight, PackedTensor) else weight
    kind = weight.format if isinstance(weight, PackedTensor) else str(weight.dtype).removeprefix("torch.")
    found = blake2b(f"{name} {kind} {tuple(weight.shape)} ".encode(), digest_size=CHECKSUM_BYTES)
    found.update(values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return f"{name} {found.hexdigest()}"


def _is_finite(weight: Weight) -> bool:
    """Whether all numbers are; packed ones are not looked into."""
    if isinstance(weight, PackedTensor) or not weight.is_floating_point() or not weight.numel():
        return True
    narrow = weight.element_size() == 1  # which torch does not compare
    least, most = torch.aminmax(weight.float() if narrow else weight)
    return math.isfinite(least.item()) and math.isfinite(most.item())
