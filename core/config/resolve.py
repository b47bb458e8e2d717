"""From what was asked to what will run: an ordered list of rules, none of which reads a weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dovetail.config import rules_checkpoint, rules_model, rules_quantization, rules_run
from dovetail.config.manifest import differences
from dovetail.config.resolution import Resolution
from dovetail.config.resolved import ResolvedConfig, ResolvedModel
from dovetail.config.rules_draft import note_lengths
from dovetail.config.rules_speculation import Target, choose_speculation
from dovetail.config.tree import get
from dovetail.contracts.model import ModelSize
from dovetail.contracts.weights import ModelFiles
from dovetail.registry.bootstrap import plugin_hash


def run_rules(state: Resolution) -> ResolvedConfig:
    """Runs every rule, in an order in which each finds what it needs. Where one raises, `state` holds the decisions
    that were made before."""
    config = state.config
    executor, asked = rules_run.find_executor(state)
    source, files = rules_model.find_files(state)
    weight_format, opener, hf_config = rules_model.read_config(state, files)
    rules_model.refuse_quantized_checkpoint(opener, hf_config)
    stored = rules_checkpoint.compare(state, opener, files, hf_config)
    hf_config = stored.config
    dtype = rules_model.choose_dtype(state, hf_config)
    family, size = rules_model.choose_family(state, hf_config, dtype)
    rules_checkpoint.refuse_more_than_stored(size, stored, files)
    quantization, packed_formats = rules_quantization.choose_quantization(
        state, family, opener, files, hf_config, dtype
    )
    operators = rules_run.choose_operators(state, family, dtype)
    need = rules_run.attention_need(state, hf_config, size, dtype, trees=False)
    kv_dtype = rules_run.choose_kv_dtype(state, need, is_quantized=quantization is not None)
    cache = rules_run.plan_cache(state, kv_dtype)
    target = Target(files, opener, size, dtype, cache.dtype, family.plugin)
    speculation, trees = choose_speculation(state, target)
    drafters = list(speculation.drafters.values()) if speculation is not None else []
    per_token = rules_run.kv_bytes_per_token(size, cache.dtype, config.executor.tensor_parallel)
    per_token += sum(drafter.bytes_per_token for drafter in drafters)
    rules_run.refuse_more_than_host(state, cache, per_token)
    max_model_len = rules_model.choose_length(state, size, rules_run.kv_capacity(cache, per_token))
    note_lengths(state, drafters, max_model_len)
    limits = rules_run.set_limits(state, max_model_len)
    settled_executor = rules_run.settle_executor(state, executor, asked)
    attention = rules_run.choose_attention(state, replace(need, kv_dtype=kv_dtype, trees=trees))
    scheduler = rules_run.choose_scheduler(state, limits)
    processors = rules_run.choose_processors(state)
    telemetry = rules_run.choose_telemetry(state)
    model = _resolved_model(state, files, hf_config, dtype, max_model_len, size, packed_formats)
    resolved = ResolvedConfig(
        model=model,
        cache=cache,
        device_type=state.environment.device_type,
        tensor_parallel=config.executor.tensor_parallel,
        num_threads=get(state.values, ("executor", "threads")),
        enforce_eager=config.executor.enforce_eager,
        executor=settled_executor,
        attention=attention,
        scheduler=scheduler,
        limits=limits,
        model_family=family.component,
        weight_format=weight_format.component,
        model_source=source.component,
        quantization=quantization,
        operators=operators,
        speculation=speculation,
        reproducibility=config.reproducibility,
        logits_processors=processors,
        telemetry=telemetry,
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


def _resolved_model(
    state: Resolution,
    files: ModelFiles,
    hf_config: Mapping[str, Any],
    dtype: str,
    max_model_len: int,
    size: ModelSize,
    packed_formats: frozenset[str],
) -> ResolvedModel:
    section = state.config.model
    return ResolvedModel(
        files=files,
        hf_config=hf_config,
        dtype=dtype,
        max_model_len=max_model_len,
        size=size,
        eos_token_ids=rules_model.eos_token_ids(state, hf_config, size.vocab_size),
        tokenizer=rules_model.resolve_tokenizer(state),
        tokenizer_mode=section.tokenizer_mode,
        seed=section.seed,
        max_logprobs=section.max_logprobs,
        packed_formats=packed_formats,
        packed_cache_gib=section.packed_cache_gib,
        max_completions=section.max_completions,
    )
