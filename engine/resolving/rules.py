"""The rules in their order, and where they begin."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from dovetail.config.layers import LayeredConfig
from dovetail.config.manifest import differences
from dovetail.config.resolved import Component, ResolvedCache, ResolvedConfig, ResolvedDrafter, ResolvedModel
from dovetail.config.schema import AUTO
from dovetail.config.tree import get
from dovetail.contracts.attention import AttentionNeed
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.plugin import Environment
from dovetail.contracts.weight_transport import WeightTransportNeed
from dovetail.engine.resolving.attention import attention_need
from dovetail.engine.resolving.cache import choose_kv_dtype, plan_cache, refuse_more_than_host
from dovetail.engine.resolving.choose import choose
from dovetail.engine.resolving.dialect import choose_dialect
from dovetail.engine.resolving.encoder import no_cache, settle_encoder
from dovetail.engine.resolving.executor import FoundExecutor, find_executor, settle_executor
from dovetail.engine.resolving.experiments import describe_experiments
from dovetail.engine.resolving.grammar import choose_grammar
from dovetail.engine.resolving.kv_connector import choose_kv_connector
from dovetail.engine.resolving.limits import choose_max_model_len, set_limits
from dovetail.engine.resolving.lock import check_lock, settle_lock
from dovetail.engine.resolving.lora import settle_lora
from dovetail.engine.resolving.model import ChosenModel, choose_model
from dovetail.engine.resolving.operators import choose_operators
from dovetail.engine.resolving.pooling import choose_poolers
from dovetail.engine.resolving.resolution import Resolution
from dovetail.engine.resolving.sentence import trained_length
from dovetail.engine.resolving.slots import ATTENTION, PROCESSOR, SCHEDULER, TELEMETRY, WEIGHT_TRANSPORT
from dovetail.engine.resolving.source import refuse_missing_model
from dovetail.engine.resolving.speculation import choose_speculation, note_lengths
from dovetail.engine.resolving.stages import choose_stage_layers
from dovetail.engine.resolving.tokenizer import eos_token_ids, resolve_chat_template, resolve_tokenizer
from dovetail.registry.bootstrap import plugin_hash
from dovetail.registry.registry import Registry
from dovetail.worker.activity import activity
from dovetail.worker.kv_size import kv_bytes_per_token, kv_capacity
from dovetail.worker.machine.environment import detect_environment

logger = logging.getLogger("dovetail.config")


def resolve(
    layered: LayeredConfig, registry: Registry | None = None, environment: Environment | None = None
) -> ResolvedConfig:
    """Makes every choice and fills every value. Logs what is odd and stops nothing.

    `registry` and `environment` default to what is installed and to this machine.
    Raises `ConfigError` for what is refused, `PluginError` for a named plugin that cannot be loaded, `ModelError`
    for a model that is not there or that nothing can build.
    """
    _refuse_replicas(layered)
    with activity("choosing components"):
        registry = registry if registry is not None else Registry.scan()
        if environment is None:
            refuse_missing_model(layered, registry)
        resolved = run_rules(create_resolution(layered, registry, environment))
    for warning in resolved.warnings:
        logger.warning("%s", warning)
    return resolved


def _refuse_replicas(layered: LayeredConfig) -> None:
    """Raises `ConfigError` for replicas that are asked of one engine. Those of a file are the server's business."""
    server, key = layered.config.server, "server.data_parallel_size"
    if server is not None and server.data_parallel_size > 1 and layered.origin(key).startswith("keyword"):
        raise ConfigError(
            f"{key} {server.data_parallel_size} ({layered.origin(key)}): an engine is one replica; `dovetail serve"
            " --data-parallel-size` runs several behind a router, and `ReplicatedEngine` speaks to several"
        )


def create_resolution(
    layered: LayeredConfig, registry: Registry | None = None, environment: Environment | None = None
) -> Resolution:
    """A resolution that has not begun."""
    if environment is None:
        device = layered.config.device
        environment = detect_environment(None if device == AUTO else device)
    registry = registry if registry is not None else Registry.scan()
    return Resolution(layered, registry, environment)


def run_rules(state: Resolution) -> ResolvedConfig:
    """Runs every rule, in an order in which each finds what it needs. Where one raises, `state` holds the decisions
    that were made before."""
    config, found = state.config, _find_executor(state)
    model = choose_model(state)
    stage_layers = choose_stage_layers(state, model)
    lora = settle_lora(state, model.dtype)
    operators = choose_operators(state, model)
    need = attention_need(state, model)
    kv_dtype, cache = _choose_cache(state, model, need)
    speculation, trees = choose_speculation(state, model, cache.dtype, stage_layers)
    drafters = list(speculation.drafters.values()) if speculation is not None else []
    per_token = _bytes_per_token(state, model, cache, stage_layers, drafters)
    max_model_len = _choose_length(state, model, kv_capacity(cache, per_token))
    note_lengths(state, drafters, max_model_len)
    limits = set_limits(state, max_model_len, whole_prompts=model.size.is_encoder)
    executor = settle_executor(state, found)
    attention = choose(state, ATTENTION, replace(need, kv_dtype=kv_dtype, trees=trees)).component
    scheduler = choose(state, SCHEDULER, limits).component
    chat_template = resolve_chat_template(state)
    dialect = choose_dialect(state, model, chat_template)
    processors = {name: choose(state, PROCESSOR.at(name), None).component for name in config.logits_processors}
    sinks = [choose(state, TELEMETRY.at(str(index)), None).component for index in range(len(config.telemetry))]
    resolved_model = replace(_resolved_model(state, model, max_model_len), chat_template=chat_template)
    grammar = choose_grammar(state, resolved_model)
    resolved = ResolvedConfig(
        model=resolved_model,
        cache=cache,
        device_type=state.environment.device_type,
        tensor_parallel=config.executor.tensor_parallel,
        stage_layers=stage_layers,
        num_replicas=state.num_replicas,
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
        weight_transport=_weight_transport(state),
        kv_connector=choose_kv_connector(state, model.size.is_encoder),
        lora=lora,
        worker_memory_bytes=state.environment.memory_bytes,
        reproducibility=config.reproducibility,
        dialect=dialect,
        grammar=grammar,
        pooling=choose_poolers(state, model),
        logits_processors=processors,
        telemetry=tuple(sinks),
        experiments=describe_experiments(state, speculation),
        decisions=state.decisions,
        plugin_hash="",
        values=state.values,
    )
    return _complete(state, resolved)


def _find_executor(state: Resolution) -> FoundExecutor:
    """Before everything else but what a lock says."""
    settle_lock(state)
    return find_executor(state)


def _bytes_per_token(
    state: Resolution,
    model: ChosenModel,
    cache: ResolvedCache,
    stage_layers: Sequence[int],
    drafters: Sequence[ResolvedDrafter],
) -> int:
    """KV bytes of a token on the rank that keeps the most. Raises `ConfigError` for pages that the host cannot hold."""
    whole = kv_bytes_per_token(model.size, cache.dtype, state.config.executor.tensor_parallel)
    num_layers = model.size.num_layers
    of_stages = [whole * count // num_layers for count in stage_layers or (num_layers,)]
    of_stages[-1] += sum(drafter.bytes_per_token for drafter in drafters)  # they run on the last stage
    refuse_more_than_host(state, cache, of_stages)
    return max(of_stages)


def _choose_length(state: Resolution, model: ChosenModel, capacity: int | None) -> int:
    """`max_model_len`, where the KV memory has pages for `capacity` tokens (None: it is not known yet)."""
    trained = trained_length(model.files.path) if model.size.is_encoder else None
    return choose_max_model_len(state, model.size, capacity, trained)


def _choose_cache(state: Resolution, model: ChosenModel, need: AttentionNeed) -> tuple[str, ResolvedCache]:
    """The dtype of keys and values, and the pages: none of an encoder."""
    if model.size.is_encoder:
        settle_encoder(state)
        return model.dtype, no_cache(state, model.dtype)
    kv_dtype = choose_kv_dtype(state, need, is_quantized=model.quantization is not None)
    return kv_dtype, plan_cache(state, kv_dtype)


def _complete(state: Resolution, resolved: ResolvedConfig) -> ResolvedConfig:
    """With what is known once every component is."""
    components = resolved.components()
    check_lock(state, resolved)
    warnings = [*state.all_warnings(), *differences(state.layered.recorded, components)]
    return replace(resolved, plugin_hash=plugin_hash(components), warnings=tuple(warnings))


def _weight_transport(state: Resolution) -> Component | None:
    if state.config.weight_transport is None:
        return None
    need = WeightTransportNeed(state.environment.device_type, state.config.executor.tensor_parallel)
    return choose(state, WEIGHT_TRANSPORT, need).component


def _resolved_model(state: Resolution, model: ChosenModel, max_model_len: int) -> ResolvedModel:
    section = state.config.model
    return ResolvedModel(
        files=model.files,
        hf_config=model.hf_config,
        dtype=model.dtype,
        max_model_len=max_model_len,
        size=model.size,
        eos_token_ids=eos_token_ids(state, model.hf_config, model.size.vocab_size),
        tokenizer=resolve_tokenizer(state),
        tokenizer_mode=section.tokenizer_mode,
        seed=section.seed,
        max_logprobs=section.max_logprobs,
        logprobs_mode=section.logprobs_mode,
        packed_formats=model.packed_formats,
        packed_cache_gib=section.packed_cache_gib,
        max_completions=section.max_completions,
    )
