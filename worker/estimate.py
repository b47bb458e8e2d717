"""Memory estimates from the headers of a checkpoint and from the config; no weight is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from dovetail.config.resolved import Component, ResolvedConfig, ResolvedDraftModel
from dovetail.contracts.kv import DTYPE_BYTES
from dovetail.contracts.model import ModelFamily, ModelSize
from dovetail.contracts.plugin import Environment
from dovetail.contracts.quantization import QuantizationMethod, QuantizationNeed
from dovetail.contracts.weights import ModelFiles, TensorInfo, WeightFormat
from dovetail.registry.components import create_class
from dovetail.worker.adapters.planning import slot_bytes
from dovetail.worker.kv_size import kv_bytes_per_token, kv_capacity

if TYPE_CHECKING:
    from dovetail.contracts.layer_plan import LayerPlan


@dataclass(frozen=True)
class StageEstimate:
    """What one pipeline stage will take. Bytes are per rank."""

    first_layer: int
    num_layers: int
    num_ranks: int
    """Ranks that share its layers (tensor parallel)."""
    weight_bytes: int
    kv_bytes_per_token: int
    sent_bytes_per_token: int
    """States that each of its ranks sends to the next stage in a step, in one message, for each token that the step
    computes; 0 for the last stage. Its first rank sends most where drafters read states between layers."""


@dataclass(frozen=True)
class MemoryEstimate:
    """What a run will take. Bytes are per rank, except those of the checkpoint; over pipeline stages, of a rank of the
    stage that takes the most."""

    num_parameters: int
    checkpoint_bytes: int
    weight_bytes: int
    """Weights in memory, as if every one of them were split evenly over ranks; those that a quantization method serves
    as it holds them. `copied_bytes` included."""
    copied_bytes: int
    """Of these, what a table of embeddings takes a second time, for the output layer that is tied to it."""
    served_layers: str | None
    """How many layers the quantization method serves, and why not the others; None without one."""
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
    adapter_bytes: int = 0
    """Slots for low-rank adapters."""
    stages: tuple[StageEstimate, ...] = ()
    """Pipeline stages, in order; empty for one."""
    target_copy_bytes: int = 0
    """Whole copies of the model's embedding and output layer, for drafters, on the rank that drafts."""


def estimate_memory(resolved: ResolvedConfig, environment: Environment) -> MemoryEstimate:
    """Estimates the memory of a resolved configuration. Raises `ModelError` for a checkpoint that is damaged."""
    infos = _tensor_infos(resolved.weight_format, resolved.model.files)
    weights = [_stage_weights(resolved, infos, stage) for stage in range(resolved.num_stages)]
    largest = max(weights, key=lambda one: one.num_bytes)
    weight_bytes = largest.num_bytes
    family, options = create_class(resolved.model_family)
    size = cast(type[ModelFamily], family)(options).size(resolved.model.hf_config)
    drafters = resolved.speculation.drafters.values() if resolved.speculation is not None else ()
    draft_bytes = sum(drafter.bytes_per_token for drafter in drafters)
    draft_weight_bytes = sum(
        _draft_weights(drafter.model, resolved.device_type).num_bytes
        for drafter in drafters
        if drafter.model is not None
    )
    stages = _stages(resolved, size, weights)
    of_layers = kv_bytes_per_token(size, resolved.cache.dtype, resolved.tensor_parallel)
    per_token = max((stage.kv_bytes_per_token for stage in stages), default=of_layers) + draft_bytes
    adapter_bytes = slot_bytes(resolved)
    target_copy_bytes = _copy_bytes(resolved, infos)
    held = weight_bytes + draft_weight_bytes + target_copy_bytes + adapter_bytes
    kv_bytes, kv_tokens = _kv_memory(resolved, environment, held, per_token)
    return MemoryEstimate(
        num_parameters=sum(math.prod(info.shape) for info in infos),
        checkpoint_bytes=sum(info.num_bytes for info in infos),
        weight_bytes=weight_bytes,
        copied_bytes=largest.copied,
        served_layers=largest.served,
        kv_bytes_per_token=per_token,
        draft_bytes_per_token=draft_bytes,
        draft_weight_bytes=draft_weight_bytes,
        target_copy_bytes=target_copy_bytes,
        adapter_bytes=adapter_bytes,
        kv_bytes=kv_bytes,
        kv_tokens=kv_tokens,
        max_concurrency=None if kv_tokens is None else kv_tokens / resolved.model.max_model_len,
        stages=stages,
    )


def _stages(resolved: ResolvedConfig, size: ModelSize, weights: Sequence[_Weights]) -> tuple[StageEstimate, ...]:
    if not resolved.stage_layers:
        return ()
    per_layer = kv_bytes_per_token(size, resolved.cache.dtype, resolved.tensor_parallel) // size.num_layers
    sent = size.hidden_size * DTYPE_BYTES[resolved.model.dtype]
    last = resolved.num_stages - 1
    drafters = resolved.speculation.drafters.values() if resolved.speculation is not None else ()
    between = {layer for drafter in drafters for layer in drafter.hidden_layers}

    def num_sent(stage: int) -> int:
        end = sum(resolved.stage_layers[: stage + 1])
        return 1 + sum(layer < end for layer in between) if stage < last else 0

    return tuple(
        StageEstimate(
            first_layer=sum(resolved.stage_layers[:stage]),
            num_layers=num_layers,
            num_ranks=resolved.tensor_parallel,
            weight_bytes=weights[stage].num_bytes,
            kv_bytes_per_token=per_layer * num_layers,
            sent_bytes_per_token=sent * num_sent(stage),
        )
        for stage, num_layers in enumerate(resolved.stage_layers)
    )


def _stage_weights(resolved: ResolvedConfig, infos: Sequence[TensorInfo], stage: int) -> _Weights:
    held = _Held(
        resolved.layers_of_stage(stage), is_first_stage=stage == 0, is_last_stage=stage == resolved.num_stages - 1
    )
    return _weights(
        resolved.model_family,
        resolved.model.hf_config,
        infos,
        resolved.quantization,
        resolved.quantization_need(),
        resolved.tensor_parallel,
        held,
    )


def _copy_bytes(resolved: ResolvedConfig, infos: Sequence[TensorInfo]) -> int:
    """What copies of the model's ends take: a table that the last stage has anyhow is held once."""
    parts = resolved.copied_parts
    if not parts:
        return 0

    def ends(*, first: bool, last: bool) -> int:
        held = _Held(range(0), is_first_stage=first, is_last_stage=last)
        need, method = resolved.quantization_need(), resolved.quantization
        return _weights(resolved.model_family, resolved.model.hf_config, infos, method, need, 1, held).num_bytes

    if resolved.tensor_parallel == 1:
        both, last = ends(first=True, last=True), ends(first=False, last=True)
        return both - last
    return ends(first=parts.embedding, last=parts.output)


def _draft_weights(model: ResolvedDraftModel, device_type: str) -> _Weights:
    infos = _tensor_infos(model.weight_format, model.files)
    need = model.quantization_need(device_type)
    return _weights(model.family, model.hf_config, infos, model.quantization, need, ranks=1)


def _tensor_infos(weight_format: Component, files: ModelFiles) -> list[TensorInfo]:
    plugin, options = create_class(weight_format)
    reader = cast(type[WeightFormat], plugin)(options).open(files)
    try:
        return list(reader.infos())
    finally:
        reader.close()


@dataclass(frozen=True)
class _Held:
    """What a rank's stage has of a model."""

    layers: range | None = None
    """None: all."""
    is_first_stage: bool = True
    is_last_stage: bool = True


@dataclass(frozen=True)
class _Weights:
    """What the weights of one model take on one rank."""

    num_bytes: int
    copied: int
    """Of these, a table's second copy."""
    served: str | None


def _weights(
    family: Component,
    hf_config: Mapping[str, Any],
    infos: Sequence[TensorInfo],
    quantization: Component | None,
    need: QuantizationNeed,
    ranks: int,
    held: _Held = _Held(),
) -> _Weights:
    plain = DTYPE_BYTES[need.dtype]
    plugin, _ = create_class(family)
    if not cast(type[ModelFamily], plugin).capabilities.quantization:
        return _Weights(sum(math.prod(info.shape) for info in infos) * plain // ranks, 0, None)
    import torch  # which most commands do without

    from dovetail.nn.layer_plan import bytes_held, second_copies

    plan = _plan(family, hf_config, ranks, held)
    method, served = None, None
    if quantization is not None:
        chosen, options = create_class(quantization)
        method = cast(type[QuantizationMethod], chosen)(options, need)
        served = f"{quantization.name} {plan.ask(method)}"
    copied = second_copies(plan, method, need.device_type, getattr(torch, need.dtype))
    num_bytes = plan.num_bytes(bytes_held(plan, method, plain, infos))
    return _Weights(num_bytes + copied, copied, served)


def _plan(family: Component, hf_config: Mapping[str, Any], ranks: int, held: _Held) -> LayerPlan:
    from dovetail.nn.layer_plan import plan_layers

    plugin, options = create_class(family)
    return plan_layers(
        cast(type[ModelFamily], plugin)(options),
        hf_config,
        tensor_parallel=ranks,
        layers_held=held.layers,
        is_first_stage=held.is_first_stage,
        is_last_stage=held.is_last_stage,
    )


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
