"""The bytes of KV blocks: device pages, host pages, and copies between them. Pages are never looked into."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from dovetail.contracts.attention import AttentionBackend
from dovetail.contracts.kv import DTYPE_BYTES, KVLayout, KVSpec
from dovetail.nn.host_copies import on_device
from dovetail.worker.pinned_pages import pinned_pages


class KVStorage:
    """The KV tensors of a layout with `num_blocks` pages each, and as many host pages as swapping may use. The extra
    ones, of layers that are not the model's own, come last, and only on a rank that `has_extra`."""

    def __init__(
        self, layout: KVLayout, num_blocks: int, num_host_blocks: int, device: torch.device, *, has_extra: bool = True
    ):
        self._layout = layout
        on_host = device.type == "cpu"
        page_bytes = [layout.page_bytes] * layout.num_tensors
        self._first_extra: dict[str, int] = {}
        """By owner, the index of its first KV tensor."""
        for extra in layout.extra_tensors if has_extra else ():
            self._first_extra[extra.owner] = len(page_bytes)
            page_bytes += extra.page_bytes
        self._tensors = [
            _host_pages(num_blocks, size)
            if on_host
            else torch.zeros(num_blocks, size, dtype=torch.uint8, device=device)
            for size in page_bytes
        ]
        self._host = [
            _host_pages(num_host_blocks, size) if on_host else pinned_pages(num_host_blocks, size)
            for size in (page_bytes if num_host_blocks else ())
        ]
        self._num_blocks = num_blocks
        self._device = device

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self._device

    @property
    def layout(self) -> KVLayout:
        """What the pages are of: the layers of this rank."""
        return self._layout

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The KV tensors on the device, the extra ones last: uint8 [num_blocks, page_bytes] each."""
        return self._tensors

    def extra_view(self, owner: str, index: int, spec: KVSpec, backend: AttentionBackend) -> torch.Tensor:
        """The cache of a layer that is not the model's own, by its index among those of its owner; as `view`."""
        return self.view(self._first_extra[owner] + index, spec, backend)

    def view(self, index: int, spec: KVSpec, backend: AttentionBackend) -> torch.Tensor:
        """The cache of a layer in the KV tensor `index`, in the shape that its backend asks for. The distance between
        pages is the tensor's, which is larger than the page if another layer of the tensor has larger pages.

        Raises `ValueError` for a shape of another size.
        """
        shape = backend.kv_cache_shape(self._num_blocks)
        itemsize = DTYPE_BYTES[spec.dtype]
        page = math.prod(shape[1:]) * itemsize
        expected = spec.page_bytes(self._layout.block_size)
        if shape[0] != self._num_blocks or page != expected:
            raise ValueError(
                f"{type(backend).__name__}.kv_cache_shape returned {shape}: dimension 0 must be {self._num_blocks} and"
                f" a page must take {expected} bytes, not {page}"
            )
        elements = self._tensors[index].view(_torch_dtype(spec.dtype))
        strides = [1] * len(shape)
        for dim in range(len(shape) - 2, 0, -1):
            strides[dim] = strides[dim + 1] * shape[dim + 1]
        strides[0] = self._tensors[index].shape[1] // itemsize
        return elements.as_strided(shape, strides)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (device block, host block) pairs to the host, without waiting for it."""
        for source, target, count in _runs(pairs):
            for tensor, host in zip(self._tensors, self._host, strict=True):
                host[target : target + count].copy_(tensor[source : source + count], non_blocking=True)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (host block, device block) pairs to the device, without waiting for it."""
        for source, target, count in _runs(pairs):
            for tensor, host in zip(self._tensors, self._host, strict=True):
                tensor[target : target + count].copy_(host[source : source + count], non_blocking=True)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (from, to) pairs on the device. All sources are read before any target is written."""
        source, target = on_device(np.array(pairs, dtype=np.int64).T, self._device)
        for tensor in self._tensors:
            tensor[target] = tensor[source]


def _runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(from, to, count): neighbours that move to neighbours, as one copy each."""
    start = 0
    for index in range(1, len(pairs) + 1):
        first, last = pairs[start], pairs[index - 1]
        if index < len(pairs) and pairs[index] == (last[0] + 1, last[1] + 1):
            continue
        yield first[0], first[1], index - start
        start = index


def _host_pages(num_blocks: int, page_bytes: int) -> torch.Tensor:
    """Zeroed pages that the operating system provides when they are first touched; torch.zeros would touch them."""
    return torch.from_numpy(np.zeros((num_blocks, page_bytes), dtype=np.uint8))


def _torch_dtype(name: str) -> torch.dtype:
    dtype = torch.__dict__[name]
    assert isinstance(dtype, torch.dtype)
    return dtype
