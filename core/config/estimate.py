"""Memory estimates from the headers of a checkpoint and from the config; no weight is read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from dovetail.config.resolved import Component, ResolvedConfig, ResolvedDraftModel
from dovetail.config.rules_run import kv_bytes_per_token, kv_capacity
from dovetail.contracts.kv import DTYPE_BYTES
from dovetail.contracts.model import ModelFamily
from dovetail.contracts.plugin import Environment
from dovetail.contracts.quantization import QuantizationMethod, QuantizationNeed
from dovetail.contracts.weights import ModelFiles, TensorInfo, WeightFormat
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
    draft_bytes_per_token: int
    """Of these, what drafters take for layers of their own, on the rank that drafts."""
    draft_weight_bytes: int
    """Weights of drafters' own models."""
    kv_bytes: int | None
    """KV memory; None where neither the config nor the environment says."""
    kv_tokens: int | None
    """Tokens that it holds."""
    max_concurrency: float | None
    """Requests of max_model_len tokens that it holds at once."""


def estimate_memory(resolved: ResolvedConfig, environment: Environment) -> MemoryEstimate:
    """Estimates the memory of a resolved configuration. Raises `ModelError` for a checkpoint that is damaged."""
    model = resolved.model
    infos = _tensor_infos(resolved.weight_format, model.files)
    ranks = resolved.tensor_parallel
    weight_bytes = _weight_bytes(infos, model.dtype, resolved.quantization, resolved.quantization_need()) // ranks
    family, options = create_class(resolved.model_family)
    size = cast(type[ModelFamily], family)(options).size(resolved.model.hf_config)
    drafters = resolved.speculation.drafters.values() if resolved.speculation is not None else ()
    draft_bytes = sum(drafter.bytes_per_token for drafter in drafters)
    draft_weight_bytes = sum(
        _draft_weight_bytes(drafter.model, resolved.device_type) for drafter in drafters if drafter.model is not None
    )
    per_token = kv_bytes_per_token(size, resolved.cache.dtype, ranks) + draft_bytes
    kv_bytes, kv_tokens = _kv_memory(resolved, environment, weight_bytes + draft_weight_bytes, per_token)
    return MemoryEstimate(
        num_parameters=sum(math.prod(info.shape) for info in infos),
        checkpoint_bytes=sum(info.num_bytes for info in infos),
        weight_bytes=weight_bytes,
        kv_bytes_per_token=per_token,
        draft_bytes_per_token=draft_bytes,
        draft_weight_bytes=draft_weight_bytes,
        kv_bytes=kv_bytes,
        kv_tokens=kv_tokens,
        max_concurrency=None if kv_tokens is None else kv_tokens / resolved.model.max_model_len,
    )


def _draft_weight_bytes(model: ResolvedDraftModel, device_type: str) -> int:
    infos = _tensor_infos(model.weight_format, model.files)
    return _weight_bytes(infos, model.dtype, model.quantization, model.quantization_need(device_type))


def _tensor_infos(weight_format: Component, files: ModelFiles) -> list[TensorInfo]:
    plugin, options = create_class(weight_format)
    reader = cast(type[WeightFormat], plugin)(options).open(files)
    try:
        return list(reader.infos())
    finally:
        reader.close()


def _weight_bytes(
    infos: Iterable[TensorInfo], dtype: str, quantization: Component | None, need: QuantizationNeed
) -> int:
    plain = DTYPE_BYTES[dtype]
    if quantization is None:
        return sum(math.prod(info.shape) * plain for info in infos)
    plugin, options = create_class(quantization)
    packed = cast(type[QuantizationMethod], plugin)(options, need).bytes_per_weight()
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
