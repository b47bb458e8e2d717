"""Rules about how a model runs: device, memory, limits, executor, attention, scheduler and the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.config.choose import Chosen, Question, go_without
from dovetail.config.resolution import Resolution
from dovetail.config.resolved import Component, ResolvedCache
from dovetail.config.rules_model import ChosenModel, text_config
from dovetail.config.schema import AUTO
from dovetail.config.slots import ATTENTION, EXECUTOR, OPERATORS
from dovetail.contracts.attention import AttentionNeed
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.executor import Executor, ExecutorNeed
from dovetail.contracts.kv import KVSpec
from dovetail.contracts.model import ModelSize
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.operators import OperatorsNeed
from dovetail.contracts.plugin import Environment, FixableReason, PluginOptions
from dovetail.contracts.scheduler import SchedulerLimits

GIB = 2**30
_CPU_KV_BYTES = 4 * GIB
_CPU_KV_SHARE = 0.4
_GPU_FRACTION = 0.9
_MIN_BATCHED_TOKENS = 2048
_LONG_PROMPT_SHARE = 0.04
_MOST_STRICT_RANKS = 2


def kv_bytes_per_token(size: ModelSize, dtype: str, tensor_parallel: int) -> int:
    """Bytes that one token takes in the KV memory of one rank, if every layer keeps it."""
    num_kv_heads = max(1, size.num_kv_heads // tensor_parallel)
    return size.num_layers * KVSpec(num_kv_heads=num_kv_heads, head_size=size.head_size, dtype=dtype).page_bytes(1)


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
        swap_bytes=int(cache.swap_gib * GIB),
    )


def _host_memory(state: Resolution) -> int | None:
    """KV bytes per rank on a CPU, where weights and everything else share one memory."""
    cache = state.config.cache
    if cache.num_blocks is not None:
        return None
    if cache.memory_gib is not None:
        return int(cache.memory_gib * GIB)
    ranks = state.config.executor.tensor_parallel
    host = state.environment.memory_bytes
    shown = f"{host / GIB:.1f} GiB of host memory over {ranks} rank{'s' if ranks > 1 else ''}"
    if cache.memory_fraction is not None:
        num_bytes = int(cache.memory_fraction * host / ranks)
        reason = f"cache.memory_fraction {cache.memory_fraction} of {shown}"
    else:
        num_bytes = min(_CPU_KV_BYTES, int(_CPU_KV_SHARE * host / ranks))
        reason = f"the smaller of {_CPU_KV_BYTES // GIB} GiB and {_CPU_KV_SHARE:.0%} of {shown}"
    num_bytes -= num_bytes % 2**20
    if num_bytes == 0:
        raise ConfigError(f"cache.memory_gib: {reason} is less than 1 MiB; give a size")
    state.decide("cache.memory_gib", num_bytes / GIB, reason)
    if cache.memory_fraction is not None:
        state.decide("cache.memory_fraction", None, "turned into cache.memory_gib")
    return num_bytes


def _device_memory(state: Resolution) -> int | None:
    cache = state.config.cache
    if cache.memory_gib is not None:
        return int(cache.memory_gib * GIB)
    if cache.num_blocks is None:
        state.decide("cache.memory_fraction", cache.memory_fraction or _GPU_FRACTION, "the default on accelerators")
    return None


def refuse_more_than_host(state: Resolution, cache: ResolvedCache, bytes_per_token: int) -> None:
    """Raises `ConfigError` where the ranks together are asked to keep more in host memory than there is."""
    host, ranks = state.environment.memory_bytes, state.config.executor.tensor_parallel
    parts = {"cache.swap_gib": cache.swap_bytes}
    if state.environment.device_type == "cpu":
        if cache.num_blocks is not None:
            parts["cache.num_blocks"] = cache.num_blocks * cache.block_size * bytes_per_token
        elif cache.memory_bytes is not None:
            parts["cache.memory_gib"] = cache.memory_bytes
    total = sum(parts.values()) * ranks
    if total > host:
        names = " and ".join(
            f"{key} ({state.layered.origin(key)})" for key, num_bytes in sorted(parts.items()) if num_bytes
        )
        raise ConfigError(more_than_host(names, total, ranks, host))


def more_than_host(what: str, num_bytes: int, ranks: int, host_bytes: int) -> str:
    """What is said of memory that the host does not have; `num_bytes` of all ranks together."""
    return (
        f"{what}: {num_bytes / GIB:.1f} GiB over {ranks} rank{'s' if ranks > 1 else ''} is more than the"
        f" {host_bytes / GIB:.1f} GiB of host memory; ask for less"
    )


def kv_capacity(cache: ResolvedCache, bytes_per_token: int) -> int | None:
    """Tokens that the KV memory holds, where its size is known already. One block is kept as the null block."""
    num_blocks = cache.num_blocks
    if num_blocks is None:
        if cache.memory_bytes is None or bytes_per_token == 0:
            return None
        num_blocks = cache.memory_bytes // (bytes_per_token * cache.block_size)
    return max(0, num_blocks - 1) * cache.block_size


def set_limits(state: Resolution, max_model_len: int) -> SchedulerLimits:
    """What one step may hold. Raises `ConfigError` for limits that contradict each other."""
    section = state.config.scheduler
    tokens = section.max_num_batched_tokens
    least = section.max_num_seqs if section.enable_chunked_prefill else max(section.max_num_seqs, max_model_len)
    if tokens is None:
        tokens = max(_MIN_BATCHED_TOKENS, least)
        reason = f"{_MIN_BATCHED_TOKENS}, or what max_num_seqs and unchunked prompts need where that is more"
        state.decide("scheduler.max_num_batched_tokens", tokens, reason)
    where = state.layered.origin("scheduler.max_num_batched_tokens")
    if tokens < section.max_num_seqs:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens {tokens} ({where}) is less than scheduler.max_num_seqs "
            f"{section.max_num_seqs} ({state.layered.origin('scheduler.max_num_seqs')}): every running request needs "
            "a token per step; raise the first or lower the second"
        )
    if tokens < least:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens {tokens} ({where}) is less than model.max_model_len {max_model_len}, "
            "and scheduler.enable_chunked_prefill is off: the longest prompts would never run; raise the first, "
            "lower the second or allow chunks"
        )
    if section.max_long_partial_prefills > section.max_num_partial_prefills:
        raise ConfigError(
            f"scheduler.max_long_partial_prefills {section.max_long_partial_prefills} is more than "
            f"scheduler.max_num_partial_prefills {section.max_num_partial_prefills}: long prompts are among these"
        )
    return SchedulerLimits(
        max_num_batched_tokens=tokens,
        max_num_seqs=section.max_num_seqs,
        max_model_len=max_model_len,
        enable_chunked_prefill=section.enable_chunked_prefill,
        max_num_partial_prefills=section.max_num_partial_prefills,
        max_long_partial_prefills=section.max_long_partial_prefills,
        long_prefill_token_threshold=_long_threshold(state, max_model_len),
    )


def _long_threshold(state: Resolution, max_model_len: int) -> int:
    section = state.config.scheduler
    threshold = section.long_prefill_token_threshold
    if threshold is None:
        several = section.max_num_partial_prefills > 1
        threshold = int(_LONG_PROMPT_SHARE * max_model_len) if several else 0
        reason = (
            f"{_LONG_PROMPT_SHARE:.0%} of max_model_len" if several else "one partial prefill at a time: none is long"
        )
        state.decide("scheduler.long_prefill_token_threshold", threshold, reason)
    return threshold


@dataclass(frozen=True)
class FoundExecutor:
    """An executor that is chosen and not settled yet, and what it is asked."""

    question: Question[Executor]
    chosen: Chosen[Executor]
    need: ExecutorNeed


def find_executor(state: Resolution) -> FoundExecutor:
    """The executor; decides the device. From here on `state.environment` is that of its workers."""
    section, asked = state.config.executor, state.config.device
    _refuse_ranks(state)
    seen: dict[type[Executor], tuple[ExecutorNeed, Environment]] = {}

    def ask(executor: type[Executor], options: PluginOptions) -> Sequence[str]:
        environment = executor.environment(options, state.environment)
        if asked != AUTO:
            environment = dataclasses.replace(environment, device_type=asked)
        need = ExecutorNeed(
            environment.device_type,
            section.tensor_parallel,
            section.pipeline_parallel,
            section.enforce_eager,
            state.config.scheduler.max_num_seqs,
        )
        seen[executor] = need, environment
        return reasons_against(executor, need, options, environment)

    question = Question(state, EXECUTOR, None, ask=ask)
    try:
        chosen = question.pick()
    except ConfigError:
        _refuse_missing_device(state, [environment for _, environment in seen.values()])
        raise
    need, environment = seen[chosen.plugin]
    _refuse_missing_device(state, [environment])
    chosen = _noting_machine(state, chosen, environment)
    state.environment = environment
    _decide_device(state, environment)
    return FoundExecutor(question, chosen, need)


def _refuse_ranks(state: Resolution) -> None:
    section = state.config.executor
    if section.pipeline_parallel > 1:
        origin = state.layered.origin("executor.pipeline_parallel")
        raise ConfigError(
            f"executor.pipeline_parallel {section.pipeline_parallel} ({origin}): layers are not split over ranks yet; "
            "use executor.tensor_parallel"
        )
    if state.is_strict and section.tensor_parallel > _MOST_STRICT_RANKS:
        raise ConfigError(
            f"executor.tensor_parallel {section.tensor_parallel} ({state.layered.origin('executor.tensor_parallel')}): "
            f"with reproducibility: strict at most {_MOST_STRICT_RANKS} ranks may share a layer, since the order in "
            "which more of them are summed depends on the batch; lower it, or leave reproducibility at default"
        )


def _refuse_missing_device(state: Resolution, machines: Sequence[Environment]) -> None:
    """Of other accelerators than GPUs only their executors know (`Executor.check`)."""
    if state.config.device == "cuda" and machines and not any(machine.devices for machine in machines):
        origin, why = state.layered.origin("device"), machines[0].no_devices or "torch sees no such device here"
        raise ConfigError(f"device 'cuda' ({origin}): {why}; or use cpu, or leave it at auto")


def _noting_machine(state: Resolution, chosen: Chosen[Executor], environment: Environment) -> Chosen[Executor]:
    """With a word about the workers' machine where it is another than this process's."""
    if environment == dataclasses.replace(state.environment, device_type=environment.device_type):
        return chosen
    gpus = "".join(f", {device.name}" for device in environment.devices)
    machine = f"{environment.num_cpus} CPUs, {environment.memory_bytes / GIB:.1f} GiB{gpus}"
    note = f"its workers run on another machine ({machine}), for which all else is chosen"
    return dataclasses.replace(chosen, reason="; ".join(filter(None, (chosen.reason, note))))


def _decide_device(state: Resolution, environment: Environment) -> None:
    none = f"no accelerator: {environment.no_devices}" if environment.no_devices else "no accelerator"
    if environment.device_type == "cpu":
        reason = none
    else:
        reason = "an accelerator that torch sees" if environment.devices else "the device of the executor's workers"
    state.decide("device", environment.device_type, reason)
    if state.config.device == AUTO and isinstance(environment.no_devices, FixableReason):
        state.fixable.setdefault(str(environment.no_devices), []).append("device cuda")
    if environment.device_type != "cpu":
        for mismatch in environment.mismatches:
            state.warn(mismatch)


def settle_executor(state: Resolution, found: FoundExecutor) -> Component:
    """Decides what `find_executor` found, and the threads of each worker."""
    chosen = found.chosen
    found.question.settle(chosen)
    section = state.config.executor
    if section.threads is not None:
        _remark_threads(state, section.threads, section.tensor_parallel)
        return chosen.component
    told = chosen.plugin.threads(found.need, chosen.options, state.environment)
    if told is None:
        return chosen.component
    state.decide("executor.threads", told.count, told.reason)
    _remark_threads(state, told.count, section.tensor_parallel)
    options = chosen.component.options
    own = {"threads": told.count} if "threads" in options else {}
    return dataclasses.replace(chosen.component, options={**options, **own})


def _remark_threads(state: Resolution, threads: int, ranks: int) -> None:
    """More threads than cores wait for each other at the end of every parallel loop."""
    environment = state.environment
    cores = environment.num_cores or environment.num_cpus
    if threads * ranks > cores:
        asked = f"{threads} threads on each of {ranks} ranks" if ranks > 1 else f"{threads} threads"
        most = max(1, cores // ranks)
        advice = f"ask for {most} at most" if threads > most else f"use {cores} ranks at most"
        state.remark(
            "executor.threads",
            f"{asked} are more than the {cores} cores that this process may use, so steps wait for threads that do not "
            f"run: {advice}",
        )


def attention_need(state: Resolution, model: ChosenModel) -> AttentionNeed:
    """What the model's queries ask of a backend, pages of the same dtype, and chains of drafts."""
    text = text_config(model.hf_config)
    slides = text.get("sliding_window") and text.get("use_sliding_window") is not False
    return AttentionNeed(
        device_type=state.environment.device_type,
        dtype=model.dtype,
        block_size=state.config.cache.block_size,
        head_sizes=frozenset({model.size.head_size}),
        sliding_window=_has_reach(text, "sliding", slides),
        soft_cap=bool(text.get("attn_logit_softcapping")),
        alibi=bool(text.get("alibi")) or text.get("position_embedding_type") == "alibi",
        batch_invariant=state.is_strict,
        kv_dtype=model.dtype,
        chunked=_has_reach(text, "chunked", text.get("attention_chunk_size")),
    )


def _has_reach(text: Mapping[str, Any], word: str, otherwise: Any) -> bool:
    """Whether the config lists layers of a type with `word` in it, or `otherwise`, where it lists none."""
    layer_types = text.get("layer_types")
    if isinstance(layer_types, Sequence) and not isinstance(layer_types, str):
        return any(word in str(kind) for kind in layer_types)
    return bool(otherwise)


def choose_operators(state: Resolution, model: ChosenModel) -> Component | None:
    """The operator set; None where the config wants none, or `auto` finds none that can be used."""
    section = state.config.model.operators
    if section is None:
        return None
    if not model.family.plugin.capabilities.operators:
        reason = f"the model family {model.family.component.name!r} brings its own"
        if section.name != AUTO:
            origin = state.layered.origin("model.operators.name")
            raise ConfigError(f"model.operators.name {section.name!r} ({origin}): {reason}; remove it")
        go_without(state, OPERATORS.path, section, reason)
        return None
    need = OperatorsNeed(state.environment.device_type, model.dtype)
    otherwise = "no installed set can be used; the building blocks compute with plain torch"
    chosen = Question(state, OPERATORS, need).choose_or_none(otherwise)
    return None if chosen is None else chosen.component
