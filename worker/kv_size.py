"""How large the KV memory is, as far as the config and the model's sizes tell: no layer is built."""

from __future__ import annotations

from dovetail.config.resolved import ResolvedCache
from dovetail.contracts.model import ModelSize


def kv_bytes_per_token(size: ModelSize, dtype: str, tensor_parallel: int) -> int:
    """Bytes that one token takes in the KV memory of one rank, if every layer keeps it."""
    return size.num_layers * size.cache(dtype, tensor_parallel).page_bytes(1)


def kv_capacity(cache: ResolvedCache, bytes_per_token: int) -> int | None:
    """Tokens that the KV memory holds, where its size is known already. One block is kept as the null block."""
    num_blocks = cache.num_blocks
    if num_blocks is None:
        if cache.memory_bytes is None or bytes_per_token == 0:
            return None
        num_blocks = cache.memory_bytes // (bytes_per_token * cache.block_size)
    return max(0, num_blocks - 1) * cache.block_size
