"""Collectives of the ranks of one tensor-parallel group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 has the function by another name, and warns of the old one.
_is_renamed = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
_gather = dist.all_gather_single if _is_renamed else dist.all_gather_into_tensor


class SingleProcess:
    """A group of one: every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns `tensor`."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns `tensor`."""
        return tensor

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Returns `tensor`."""
        return tensor


class TorchDistributed:
    """A group of torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors.

    The process group must exist already; None: the default group. gloo sums float16 and bfloat16 in
    their own precision.
    """

    def __init__(self, group: Any = None):
        self._group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums over the group in place; a tensor that is not contiguous is copied first."""
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Concatenates the ranks' tensors along `dim`."""
        dim %= tensor.dim()
        gathered = tensor.new_empty(self.size * tensor.shape[0], *tensor.shape[1:])
        _gather(gathered, tensor.contiguous(), group=self._group)
        return gathered.view(self.size, *tensor.shape).movedim(0, dim).flatten(dim, dim + 1)

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Overwrites `tensor`, which must be contiguous, with that of group rank `src`."""
        dist.broadcast(tensor, group=self._group, group_src=src)
        return tensor
