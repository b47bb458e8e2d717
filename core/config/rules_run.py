"""Rules about how a model runs: device, memory, limits, executor, attention, scheduler, speculation and the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

from dovetail.config.choose import Chosen, choose, choose_or_none, go_without
from dovetail.config.resolution import Resolution
from dovetail.config.resolved import Component, ResolvedCache, ResolvedDrafter, ResolvedSpeculation
from dovetail.config.rules_model import text_config
from dovetail.config.schema import AUTO, SpeculativeSection
from dovetail.config.tree import nearest
from dovetail.contracts.attention import AttentionNeed
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.executor import ExecutorNeed
from dovetail.contracts.kv import KVSpec
from dovetail.contracts.model import ModelFamily, ModelSize
from dovetail.contracts.operators import OperatorsNeed
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.scheduler import SchedulerLimits
from dovetail.contracts.speculation import AcceptanceRule, DraftWorker, SpeculationNeed

GIB = 2**30
_CPU_KV_BYTES = 4 * GIB
_CPU_KV_SHARE = 0.4
_GPU_FRACTION = 0.9
_MIN_BATCHED_TOKENS = 2048
_LONG_PROMPT_SHARE = 0.04
_OFF = "off"
"""What a request says to go without speculation (`SamplingParams.speculation`)."""


def choose_device(state: Resolution) -> str:
    """Device type; replaces the environment by one that says so."""
    asked = state.config.device
    device = state.environment.device_type if asked == AUTO else asked
    if asked not in (AUTO, "cpu") and not state.environment.devices:
        origin = state.layered.origin("device")
        raise ConfigError(f"device {asked!r} ({origin}): torch sees no such device here; use cpu, or leave it at auto")
    state.decide("device", device, "an accelerator that torch sees" if state.environment.devices else "no accelerator")
    state.environment = dataclasses.replace(state.environment, device_type=device)
    return device


def kv_bytes_per_token(size: ModelSize, dtype: str, tensor_parallel: int) -> int:
    """Bytes that one token takes in the KV memory of one rank, if every layer keeps it."""
    num_kv_heads = max(1, size.num_kv_heads // tensor_parallel)
    return size.num_layers * KVSpec(num_kv_heads, size.head_size, dtype).page_bytes(1)


def plan_cache(state: Resolution, dtype: str) -> ResolvedCache:
    """The KV memory: dtype, and size in bytes or blocks where it is known before the weights are loaded. Whether a
    dtype can be had is for the attention backends to say."""
    cache = state.config.cache
    if cache.dtype == AUTO:
        state.decide("cache.dtype", dtype, "the model's dtype")
    else:
        dtype = cache.dtype
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
        raise ConfigError(
            f"{names}: {total / GIB:.1f} GiB over {ranks} rank{'s' if ranks > 1 else ''} is more than the "
            f"{host / GIB:.1f} GiB of host memory; ask for less"
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


def choose_executor(state: Resolution) -> Component:
    """The executor."""
    section = state.config.executor
    if section.pipeline_parallel > 1:
        origin = state.layered.origin("executor.pipeline_parallel")
        raise ConfigError(
            f"executor.pipeline_parallel {section.pipeline_parallel} ({origin}): layers are not split over ranks yet; "
            "use executor.tensor_parallel"
        )
    need = ExecutorNeed(
        state.environment.device_type, section.tensor_parallel, section.pipeline_parallel, section.enforce_eager
    )
    return choose(
        state, ("executor",), "executor", section, lambda plugin, o: plugin.check(need, o, state.environment)
    ).component


def choose_attention(
    state: Resolution, hf_config: Mapping[str, Any], size: ModelSize, dtype: str, kv_dtype: str, *, trees: bool
) -> Component:
    """The attention backend, for queries of `dtype` and pages of `kv_dtype`."""
    text = text_config(hf_config)
    need = AttentionNeed(
        device_type=state.environment.device_type,
        dtype=dtype,
        block_size=state.config.cache.block_size,
        head_sizes=frozenset({size.head_size}),
        sliding_window=_has_window(text),
        soft_cap=bool(text.get("attn_logit_softcapping")),
        alibi=bool(text.get("alibi")) or text.get("position_embedding_type") == "alibi",
        trees=trees,
        kv_dtype=kv_dtype,
    )
    return choose(
        state,
        ("attention",),
        "attention_backend",
        state.config.attention,
        lambda plugin, o: plugin.check(need, o, state.environment),
    ).component


def _has_window(text: Mapping[str, Any]) -> bool:
    layer_types = text.get("layer_types")
    if isinstance(layer_types, Sequence) and not isinstance(layer_types, str):
        return any("sliding" in str(kind) or "chunked" in str(kind) for kind in layer_types)
    return bool(text.get("sliding_window")) and text.get("use_sliding_window", True) is not False


def choose_scheduler(state: Resolution, limits: SchedulerLimits) -> Component:
    """The scheduler."""
    return choose(
        state,
        ("scheduler",),
        "scheduler",
        state.config.scheduler,
        lambda plugin, o: plugin.check(limits, o, state.environment),
    ).component


def choose_operators(state: Resolution, family: Chosen, dtype: str) -> Component | None:
    """The operator set; None where the config wants none, or `auto` finds none that can be used."""
    section = state.config.model.operators
    if section is None:
        return None
    if not cast(type[ModelFamily], family.plugin).takes_operators:
        reason = f"the model family {family.component.name!r} brings its own"
        if section.name != AUTO:
            origin = state.layered.origin("model.operators.name")
            raise ConfigError(f"model.operators.name {section.name!r} ({origin}): {reason}; remove it")
        go_without(state, ("model", "operators"), section, reason)
        return None
    need = OperatorsNeed(state.environment.device_type, dtype)
    chosen = choose_or_none(
        state,
        ("model", "operators"),
        "operators",
        section,
        lambda plugin, o: plugin.check(need, o, state.environment),
        "no installed set can be used; the building blocks compute with plain torch",
    )
    return None if chosen is None else chosen.component


def choose_speculation(
    state: Resolution, hf_config: Mapping[str, Any], size: ModelSize, dtype: str
) -> tuple[ResolvedSpeculation | None, bool]:
    """Drafters and acceptance rule, and whether some drafter proposes trees."""
    section = state.config.speculative
    if section is None:
        return None, False
    need = SpeculationNeed(
        device_type=state.environment.device_type,
        dtype=dtype,
        vocab_size=size.vocab_size,
        hidden_size=int(text_config(hf_config).get("hidden_size", 0)),
        tensor_parallel=state.config.executor.tensor_parallel,
        num_tokens=max(drafter.num_tokens for drafter in section.drafters.values()),
    )
    drafters = {name: _choose_drafter(state, section, name, need) for name in section.drafters}
    trees = any(_is_tree_drafter(drafter) for drafter in drafters.values())
    acceptance = _choose_acceptance(state, section, need, trees=trees)
    resolved = {
        name: ResolvedDrafter(name, drafter.component, section.drafters[name].num_tokens)
        for name, drafter in drafters.items()
    }
    return ResolvedSpeculation(resolved, _default_drafter(state, section), acceptance), trees


def _choose_drafter(state: Resolution, section: SpeculativeSection, name: str, need: SpeculationNeed) -> Chosen:
    if name == _OFF:
        raise ConfigError(
            f"speculative.drafters.{name}: requests say {_OFF!r} to go without a drafter; name it otherwise"
        )
    drafter = section.drafters[name]
    own_need = dataclasses.replace(need, num_tokens=drafter.num_tokens)
    return choose(
        state,
        ("speculative", "drafters", name),
        "draft_worker",
        drafter,
        lambda plugin, o: plugin.check(own_need, o, state.environment),
    )


def _is_tree_drafter(drafter: Chosen) -> bool:
    return cast(type[DraftWorker], drafter.plugin).capabilities.trees


def _choose_acceptance(
    state: Resolution, section: SpeculativeSection, need: SpeculationNeed, *, trees: bool
) -> Component:
    named = section.acceptance.name != AUTO

    def against(rule: type[AcceptanceRule], options: PluginOptions) -> Sequence[str]:
        reasons = ["a drafter proposes trees, and it judges chains only"] if trees and not rule.trees else []
        if not named and not rule.lossless:
            reasons.append("it is lossy: it must be asked for by name")
        if not named and rule.greedy_only:
            reasons.append("it serves greedy requests only: it must be asked for by name")
        return [*reasons, *rule.check(need, options, state.environment)]

    path = ("speculative", "acceptance")
    return choose(state, path, "acceptance_rule", section.acceptance, against).component


def _default_drafter(state: Resolution, section: SpeculativeSection) -> str | None:
    names = list(section.drafters)
    asked = section.default
    if asked is None or asked in section.drafters:
        return asked
    origin = state.layered.origin("speculative.default")
    if asked != AUTO:
        raise ConfigError(
            f"speculative.default {asked!r} ({origin}) is no drafter of the config; {nearest(asked, names)}"
        )
    if len(names) > 1:
        raise ConfigError(
            f"speculative.default: which of {', '.join(names)} should requests get that name none? Write one, or null"
        )
    state.decide("speculative.default", names[0], "the only drafter")
    return names[0]


def choose_processors(state: Resolution) -> dict[str, Component]:
    """Logits processors by the name that requests use."""
    return {
        name: _plain(state, ("logits_processors", name), "logits_processor", section)
        for name, section in state.config.logits_processors.items()
    }


def choose_telemetry(state: Resolution) -> tuple[Component, ...]:
    """Telemetry sinks, in the order of the config."""
    return tuple(
        _plain(state, ("telemetry", str(index)), "telemetry_sink", section)
        for index, section in enumerate(state.config.telemetry)
    )


def _plain(state: Resolution, path: tuple[str, ...], kind: str, section: Any) -> Component:
    return choose(state, path, kind, section, lambda plugin, o: plugin.check(None, o, state.environment)).component
