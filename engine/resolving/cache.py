"""The rules about the KV memory: its dtype and its size."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dovetail.config.resolved import ResolvedCache
from dovetail.config.schema import AUTO
from dovetail.contracts.attention import AttentionNeed
from dovetail.contracts.errors import ConfigError
from dovetail.engine.resolving.choose import Question
from dovetail.engine.resolving.resolution import Resolution
from dovetail.engine.resolving.slots import ATTENTION

_GIB = 2**30
_CPU_KV_BYTES = 4 * _GIB
_CPU_KV_SHARE = 0.4
_GPU_FRACTION = 0.9


def choose_kv_dtype(state: Resolution, need: AttentionNeed, *, is_quantized: bool) -> str:
    """The dtype of pages. Half the bytes are enough beside weights of 8 bits or fewer, if a backend has such pages;
    whether a dtype that the config names can be had is for the backends to say later."""
    asked = state.config.cache.dtype
    if asked != AUTO:
        return asked
    half = dataclasses.replace(need, kv_dtype="float16")
    if is_quantized and need.dtype == "float32" and Question(state, ATTENTION, half).any_fits():
        state.decide("cache.dtype", "float16", "the weights are quantized, and float16 keeps more than they do")
        return "float16"
    state.decide("cache.dtype", need.dtype, "the model's dtype")
    return need.dtype


def plan_cache(state: Resolution, dtype: str) -> ResolvedCache:
    """The KV memory in pages of `dtype`, its size in bytes or blocks where that is known before the weights are
    loaded."""
    cache = state.config.cache
    sizes = {
        "cache.memory_gib": cache.memory_gib,
        "cache.memory_fraction": cache.memory_fraction,
        "cache.num_blocks": cache.num_blocks,
    }
    given = {key: value for key, value in sizes.items() if value is not None}
    if len(given) > 1:
        listed = ", ".join(f"{key} = {value} ({state.layered.origin(key)})" for key, value in given.items())
        raise ConfigError(f"the KV memory is given more than once: {listed}; keep one")
    memory_bytes = _host_memory(state) if state.environment.device_type == "cpu" else _device_memory(state)
    return ResolvedCache(
        block_size=cache.block_size,
        dtype=dtype,
        prefix_caching=cache.prefix_caching,
        memory_bytes=memory_bytes,
        memory_fraction=cache.memory_fraction or _GPU_FRACTION,
        num_blocks=cache.num_blocks,
        swap_bytes=int(cache.swap_gib * _GIB),
    )


def _host_memory(state: Resolution) -> int | None:
    """KV bytes per rank on a CPU, where weights and everything else share one memory."""
    cache = state.config.cache
    if cache.num_blocks is not None:
        return None
    if cache.memory_gib is not None:
        return int(cache.memory_gib * _GIB)
    ranks, replicas = state.config.executor.num_ranks, state.replicas_here
    host = state.environment.memory_bytes
    shown = f"{host / _GIB:.1f} GiB of host memory over {_sharers(ranks, replicas)}"
    if cache.memory_fraction is not None:
        num_bytes = int(cache.memory_fraction * host / ranks / replicas)
        reason = f"cache.memory_fraction {cache.memory_fraction} of {shown}"
    else:
        num_bytes = min(_CPU_KV_BYTES, int(_CPU_KV_SHARE * host / ranks / replicas))
        reason = f"the smaller of {_CPU_KV_BYTES // _GIB} GiB and {_CPU_KV_SHARE:.0%} of {shown}"
    num_bytes -= num_bytes % 2**20
    if num_bytes == 0:
        raise ConfigError(f"cache.memory_gib: {reason} is less than 1 MiB; give a size")
    state.decide("cache.memory_gib", num_bytes / _GIB, reason)
    if cache.memory_fraction is not None:
        state.decide("cache.memory_fraction", None, "turned into cache.memory_gib")
    return num_bytes


def _device_memory(state: Resolution) -> int | None:
    cache = state.config.cache
    if cache.memory_gib is not None:
        return int(cache.memory_gib * _GIB)
    if cache.num_blocks is None:
        state.decide("cache.memory_fraction", cache.memory_fraction or _GPU_FRACTION, "the default on accelerators")
    return None


def refuse_more_than_host(state: Resolution, cache: ResolvedCache, of_stages: Sequence[int]) -> None:
    """Raises `ConfigError` where the ranks of all replicas together are asked to keep more in host memory than there
    is. `of_stages`:
    KV bytes of a token on a rank of each pipeline stage. All ranks keep the same blocks, so those of the stage with the
    largest ones use what one rank may, and the others less."""
    host, ranks = state.environment.memory_bytes, state.config.executor.num_ranks
    largest = max(of_stages)
    parts = {"cache.swap_gib": cache.swap_bytes}
    if state.environment.device_type == "cpu":
        if cache.num_blocks is not None:
            parts["cache.num_blocks"] = cache.num_blocks * cache.block_size * largest
        elif cache.memory_bytes is not None:
            parts["cache.memory_gib"] = cache.memory_bytes
    tensor_parallel = state.config.executor.tensor_parallel
    total = sum(parts.values()) * tensor_parallel * sum(of_stages) // max(1, largest) * state.replicas_here
    if total > host:
        names = " and ".join(
            f"{key} ({state.layered.origin(key)})" for key, num_bytes in sorted(parts.items()) if num_bytes
        )
        raise ConfigError(more_than_host(names, total, ranks, host, state.replicas_here))


def more_than_host(what: str, num_bytes: int, ranks: int, host_bytes: int, replicas: int = 1) -> str:
    """What is said of memory that the host does not have; `num_bytes` of all ranks of all replicas together."""
    return (
        f"{what}: {num_bytes / _GIB:.1f} GiB over {_sharers(ranks, replicas)} is more than the"
        f" {host_bytes / _GIB:.1f} GiB of host memory; ask for less"
    )


def _sharers(ranks: int, replicas: int) -> str:
    """Who shares the host's memory, for messages."""
    shown = f"{ranks} rank{'s' if ranks > 1 else ''}"
    return shown if replicas == 1 else f"{shown} of each of {replicas} replicas (server.data_parallel_size)"
