"""Weights in buckets: what a trainer sends at a time, and how vLLM's `update_info` describes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

Named = tuple[str, torch.Tensor]


def buckets_of(weights: Iterable[Named], bucket_bytes: int) -> Iterator[list[Named]]:
    """Consecutive tensors of at most `bucket_bytes` bytes together; a larger tensor is a bucket of its own. A bucket
    comes as soon as the tensor behind it was asked for, so of an iterable that makes tensors one bucket is alive.

    Raises `ValueError` for a `bucket_bytes` below 1."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; give at least 1")
    bucket: list[Named] = []
    size = 0
    for name, tensor in weights:
        if bucket and size + num_bytes(tensor) > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += num_bytes(tensor)
    if bucket:
        yield bucket


def num_bytes(tensor: torch.Tensor) -> int:
    """Of its elements, whatever storage they are a view of."""
    return tensor.numel() * tensor.element_size()


def described(bucket: Iterable[Named]) -> Mapping[str, Any]:
    """vLLM's fields of an `update_info`: `names`, `dtype_names` ("float32") and `shapes`."""
    bucket = list(bucket)
    return {
        "names": [name for name, _ in bucket],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
    }
