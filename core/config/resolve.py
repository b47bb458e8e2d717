"""From what was asked to what will run: an ordered list of rules, none of which reads a weight."""

from __future__ import annotations

from dataclasses import replace

from dovetail.config import rules_model, rules_run
from dovetail.config.choose import choose
from dovetail.config.manifest import differences
from dovetail.config.resolution import Resolution
from dovetail.config.resolved import ResolvedConfig, ResolvedModel
from dovetail.config.rules_model import ChosenModel, choose_model
from dovetail.config.rules_speculation import choose_speculation, note_lengths
from dovetail.config.slots import ATTENTION, PROCESSOR, SCHEDULER, TELEMETRY
from dovetail.config.tree import get
from dovetail.registry.bootstrap import plugin_hash


def run_rules(state: Resolution) -> ResolvedConfig:
    """Runs every rule, in an order in which each finds what it needs. Where one raises, `state` holds the decisions
    that were made before."""
    config = state.config
    found = rules_run.find_executor(state)
    model = choose_model(state)
    operators = rules_run.choose_operators(state, model)
    need = rules_run.attention_need(state, model)
    kv_dtype = rules_run.choose_kv_dtype(state, need, is_quantized=model.quantization is not None)
    cache = rules_run.plan_cache(state, kv_dtype)
    speculation, trees = choose_speculation(state, model, cache.dtype)
    drafters = list(speculation.drafters.values()) if speculation is not None else []
    per_token = rules_run.kv_bytes_per_token(model.size, cache.dtype, config.executor.tensor_parallel)
    per_token += sum(drafter.bytes_per_token for drafter in drafters)
    rules_run.refuse_more_than_host(state, cache, per_token)
    max_model_len = rules_model.choose_length(state, model.size, rules_run.kv_capacity(cache, per_token))
    note_lengths(state, drafters, max_model_len)
    limits = rules_run.set_limits(state, max_model_len)
    executor = rules_run.settle_executor(state, found)
    attention = choose(state, ATTENTION, replace(need, kv_dtype=kv_dtype, trees=trees)).component
    scheduler = choose(state, SCHEDULER, limits).component
    processors = {name: choose(state, PROCESSOR.at(name), None).component for name in config.logits_processors}
    sinks = [choose(state, TELEMETRY.at(str(index)), None).component for index in range(len(config.telemetry))]
    resolved = ResolvedConfig(
        model=_resolved_model(state, model, max_model_len),
        cache=cache,
        device_type=state.environment.device_type,
        tensor_parallel=config.executor.tensor_parallel,
        num_threads=get(state.values, ("executor", "threads")),
        enforce_eager=config.executor.enforce_eager,
        executor=executor,
        attention=attention,
        scheduler=scheduler,
        limits=limits,
        model_family=model.family.component,
        weight_format=model.weight_format,
        model_source=model.source,
        quantization=model.quantization,
        operators=operators,
        speculation=speculation,
        worker_memory_bytes=state.environment.memory_bytes,
        reproducibility=config.reproducibility,
        logits_processors=processors,
        telemetry=tuple(sinks),
        decisions=state.decisions,
        plugin_hash="",
        values=state.values,
    )
    return _complete(state, resolved)


def _complete(state: Resolution, resolved: ResolvedConfig) -> ResolvedConfig:
    """With what is known once every component is."""
    components = resolved.components()
    warnings = [*state.all_warnings(), *differences(state.layered.recorded, components)]
    return replace(resolved, plugin_hash=plugin_hash(components), warnings=tuple(warnings))


def _resolved_model(state: Resolution, model: ChosenModel, max_model_len: int) -> ResolvedModel:
    section = state.config.model
    return ResolvedModel(
        files=model.files,
        hf_config=model.hf_config,
        dtype=model.dtype,
        max_model_len=max_model_len,
        size=model.size,
        eos_token_ids=rules_model.eos_token_ids(state, model.hf_config, model.size.vocab_size),
        tokenizer=rules_model.resolve_tokenizer(state),
        tokenizer_mode=section.tokenizer_mode,
        seed=section.seed,
        max_logprobs=section.max_logprobs,
        packed_formats=model.packed_formats,
        packed_cache_gib=section.packed_cache_gib,
        max_completions=section.max_completions,
    )
