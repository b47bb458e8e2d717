"""Memory estimates from the headers of a checkpoint and from the config; no weight is read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from dovetail.config.resolved import ResolvedConfig
from dovetail.config.rules_run import kv_bytes_per_token, kv_capacity
from dovetail.contracts.kv import DTYPE_BYTES
from dovetail.contracts.model import ModelFamily
from dovetail.contracts.plugin import Environment
from dovetail.contracts.quantization import QuantizationMethod
from dovetail.contracts.weights import TensorInfo, WeightFormat
from dovetail.registry.components import create_class


@dataclass(frozen=True)
class MemoryEstimate:
    """What a run will take. Bytes are per rank, except those of the checkpoint."""

    num_parameters: int
    checkpoint_bytes: int
    weight_bytes: int
    """Weights in memory, as if every one of them were split evenly over ranks."""
    kv_bytes_per_token: int
    """As if every layer kept every token; models with sliding windows take less."""
    kv_bytes: int | None
    """KV memory; None where neither the config nor the environment says."""
    kv_tokens: int | None
    """Tokens that it holds."""
    max_concurrency: float | None
    """Requests of max_model_len tokens that it holds at once."""


def estimate_memory(resolved: ResolvedConfig, environment: Environment) -> MemoryEstimate:
    """Estimates the memory of a resolved configuration. Raises `ModelError` for a checkpoint that is damaged."""
    infos = _tensor_infos(resolved)
    ranks = resolved.tensor_parallel
    weight_bytes = _weight_bytes(resolved, infos) // ranks
    family, options = create_class(resolved.model_family)
    size = cast(type[ModelFamily], family)(options).size(resolved.model.hf_config)
    per_token = kv_bytes_per_token(size, resolved.cache.dtype, ranks)
    kv_bytes, kv_tokens = _kv_memory(resolved, environment, weight_bytes, per_token)
    return MemoryEstimate(
        num_parameters=sum(math.prod(info.shape) for info in infos),
        checkpoint_bytes=sum(info.num_bytes for info in infos),
        weight_bytes=weight_bytes,
        kv_bytes_per_token=per_token,
        kv_bytes=kv_bytes,
        kv_tokens=kv_tokens,
        max_concurrency=None if kv_tokens is None else kv_tokens / resolved.model.max_model_len,
    )


def _tensor_infos(resolved: ResolvedConfig) -> list[TensorInfo]:
    plugin, options = create_class(resolved.weight_format)
    reader = cast(type[WeightFormat], plugin)(options).open(resolved.model.files)
    try:
        return list(reader.infos())
    finally:
        reader.close()


def _weight_bytes(resolved: ResolvedConfig, infos: Iterable[TensorInfo]) -> int:
    plain = DTYPE_BYTES[resolved.model.dtype]
    if resolved.quantization is None:
        return sum(math.prod(info.shape) * plain for info in infos)
    plugin, options = create_class(resolved.quantization)
    packed = cast(type[QuantizationMethod], plugin)(options, resolved.quantization_need()).bytes_per_weight()
    # Embeddings are looked up, not multiplied, so methods leave them alone.
    return sum(int(math.prod(info.shape) * (packed if _is_linear(info) else plain)) for info in infos)


def _is_linear(info: TensorInfo) -> bool:
    return len(info.shape) == 2 and "embed" not in info.name


def _kv_memory(
    resolved: ResolvedConfig, environment: Environment, weight_bytes: int, per_token: int
) -> tuple[int | None, int | None]:
    cache = resolved.cache
    if cache.num_blocks is not None or cache.memory_bytes is not None:
        num_bytes = cache.memory_bytes
        if cache.num_blocks is not None:
            num_bytes = cache.num_blocks * cache.block_size * per_token
        return num_bytes, kv_capacity(cache, per_token)
    if not environment.devices:
        return None, None
    smallest = min(device.memory_bytes for device in environment.devices)
    num_bytes = max(0, int(smallest * cache.memory_fraction) - weight_bytes)
    return num_bytes, num_bytes // per_token // cache.block_size * cache.block_size
