"""For any configuration: what was asked for and came out otherwise is exactly what `explain` lists as decisions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from dovetail.config.load import load_config
from dovetail.config.resolved import Component, ResolvedConfig, ResolvedLoRA
from dovetail.config.tree import get
from dovetail.engine.explanation import as_data, explain
from dovetail.engine.resolving import resolve

GIB = 2**30


def subset(**choices: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=choices)


def component(*names: str, **choices: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return subset(name=st.sampled_from(names), **choices)


PARTS: dict[str, st.SearchStrategy[Any]] = {
    "model": subset(
        dtype=st.sampled_from(["auto", "float32", "bfloat16"]),
        max_model_len=st.none() | st.integers(1, 140),
        seed=st.integers(0, 9),
        hf_overrides=subset(max_position_embeddings=st.integers(64, 256), anything=st.integers()),
        family=component("auto", "llama"),
        quantization=st.none() | component("auto", "q8", skip=st.sampled_from([[], ["o_proj"]])),
        weight_format=component("auto", "safetensors"),
    ),
    "cache": subset(
        block_size=st.sampled_from([8, 16, "16"]),
        dtype=st.sampled_from(["auto", "float32"]),
        prefix_caching=st.booleans(),
        swap_gib=st.sampled_from([0, 0.5]),
    ),
    "cache_size": st.just({})
    | subset(memory_gib=st.sampled_from([2**-10, 1, 2.5]))
    | subset(num_blocks=st.integers(2, 40))
    | subset(memory_fraction=st.sampled_from([0.25, 1])),
    "device": st.sampled_from(["auto", "cpu"]),
    "executor": component(
        "auto", "multiproc", tensor_parallel=st.integers(1, 2), threads=st.none() | st.integers(1, 2)
    ),
    "attention": component("auto", "sdpa", gather_kib=st.sampled_from([64, "128"])) | component("auto", "reference"),
    "scheduler": component(
        "auto",
        "fcfs",
        "priority",
        watermark=st.sampled_from([0, 0.5, "0.25"]),
        max_num_batched_tokens=st.none() | st.integers(1, 300),
        max_num_seqs=st.integers(1, 300),
        enable_chunked_prefill=st.booleans(),
        max_num_partial_prefills=st.integers(1, 3),
        long_prefill_token_threshold=st.none() | st.integers(0, 50),
    ),
    "speculative": st.none()
    | st.fixed_dictionaries(
        {
            "drafters": st.dictionaries(
                st.sampled_from(["a", "b"]),
                st.fixed_dictionaries(
                    {"name": st.just("ngram")},
                    optional={"num_tokens": st.integers(1, 5), "max_match": st.sampled_from([4, "5"])},
                ),
                min_size=1,
            )
        },
        optional={
            "default": st.sampled_from(["auto", "a", None]),
            "acceptance": component("auto", "greedy", "rejection"),
        },
    ),
    "logits_processors": st.just({}) | st.just({"loops": {"name": "no_repeat_ngram"}}),
    "telemetry": st.lists(st.just("log") | st.just({"name": "log"}), max_size=2),
}

configs = st.fixed_dictionaries({}, optional=PARTS)
overrides = st.lists(
    st.sampled_from(["scheduler.name=fcfs", "cache.prefix_caching=false", "attention=auto", "model.seed=3"]),
    unique=True,
    max_size=2,
)


def assemble(parts: Mapping[str, Any], model_dir: Any) -> dict[str, Any]:
    config = {key: dict(value) if isinstance(value, dict) else value for key, value in parts.items()}
    if "cache_size" in config:
        config["cache"] = {**config.get("cache", {}), **config.pop("cache_size")}
    config["model"] = {"path": str(model_dir), **config.get("model", {})}
    return config


def component_values(path: str, component: Component) -> dict[str, Any]:
    name = component.name if component.distribution else component.reference
    return {f"{path}.name": name, **{f"{path}.{key}": value for key, value in component.options.items()}}


def effective(resolved: ResolvedConfig) -> dict[str, Any]:
    """What will run, key by key, read from what the engine and its workers are told."""
    model, cache, limits = resolved.model, resolved.cache, resolved.limits
    values: dict[str, Any] = {
        "model.path": str(model.files.path),
        "model.revision": model.files.revision,
        "model.tokenizer": model.tokenizer,
        "model.tokenizer_mode": model.tokenizer_mode,
        "model.chat_template": model.chat_template,
        "model.generation_config": "auto",
        "model.override_generation_config": {},
        "model.dtype": model.dtype,
        "model.max_model_len": model.max_model_len,
        "model.seed": model.seed,
        "model.packed_cache_gib": resolved.model.packed_cache_gib,
        "model.max_logprobs": model.max_logprobs,
        "model.logprobs_mode": model.logprobs_mode,
        "model.max_completions": model.max_completions,
        "model.hf_overrides": {},
        "model.quantization": None,
        "cache.block_size": cache.block_size,
        "cache.dtype": cache.dtype,
        "cache.memory_gib": cache.memory_bytes and cache.memory_bytes / GIB,
        "cache.memory_fraction": None if cache.memory_bytes or cache.num_blocks else cache.memory_fraction,
        "cache.num_blocks": cache.num_blocks,
        "cache.prefix_caching": cache.prefix_caching,
        "cache.swap_gib": cache.swap_bytes / GIB,
        "device": resolved.device_type,
        "executor.tensor_parallel": resolved.tensor_parallel,
        "executor.pipeline_parallel": 1,
        "executor.threads": resolved.num_threads,
        "executor.enforce_eager": resolved.enforce_eager,
        "scheduler.max_num_batched_tokens": limits.max_num_batched_tokens,
        "scheduler.max_num_seqs": limits.max_num_seqs,
        "scheduler.enable_chunked_prefill": limits.enable_chunked_prefill,
        "scheduler.max_num_partial_prefills": limits.max_num_partial_prefills,
        "scheduler.max_long_partial_prefills": limits.max_long_partial_prefills,
        "scheduler.long_prefill_token_threshold": limits.long_prefill_token_threshold,
        "speculative": None,
        "reproducibility": resolved.reproducibility,
        "dialect": {},
        "grammar": None,
        "weight_transport": None,
        "pooling.normalize": resolved.pooling.normalizes,
        "logits_processors": {},
        "experiments": {},
        "telemetry": [],
    }
    lora = resolved.lora or ResolvedLoRA(max_loras=1, max_rank=16, max_cpu_loras=None, dtype="auto")
    values |= {f"lora.{key}": value for key, value in vars(lora).items()}
    values |= {"lora.enabled": resolved.lora is not None, "lora.modules": dict(lora.modules)}
    values |= {f"model.hf_overrides.{key}": value for key, value in model.hf_config.items()}
    chosen = {
        "model.family": resolved.model_family,
        "model.weight_format": resolved.weight_format,
        "model.source": resolved.model_source,
        "executor": resolved.executor,
        "attention": resolved.attention,
        "scheduler": resolved.scheduler,
        "dialect": resolved.dialect,
    }
    chosen |= {f"logits_processors.{name}": found for name, found in resolved.logits_processors.items()}
    chosen |= {f"pooling.{task}": found for task, found in resolved.pooling.poolers.items()}
    chosen |= {f"telemetry.{index}": found for index, found in enumerate(resolved.telemetry)}
    if resolved.grammar is not None:
        chosen["grammar"] = resolved.grammar.component
    if resolved.quantization is not None:
        chosen["model.quantization"] = resolved.quantization
    if resolved.operators is not None:
        chosen["model.operators"] = resolved.operators
    if resolved.speculation is not None:
        values["speculative.default"] = resolved.speculation.default
        values["speculative.disable_by_batch_size"] = resolved.speculation.disable_by_batch_size
        values["speculative.disable_logprobs"] = resolved.speculation.disable_logprobs
        values["speculative.rules"] = {}
        chosen["speculative.acceptance"] = resolved.speculation.acceptance
        chosen |= {f"speculative.rules.{name}": rule for name, rule in resolved.speculation.rules.items()}
        for name, drafter in resolved.speculation.drafters.items():
            values[f"speculative.drafters.{name}.num_tokens"] = drafter.num_tokens
            values[f"speculative.drafters.{name}.length"] = drafter.length.name
            values[f"speculative.drafters.{name}.min_confidence"] = drafter.length.options.get("min_confidence")
            chosen[f"speculative.drafters.{name}"] = drafter.component
    for path, found in chosen.items():
        values |= component_values(path, found)
    return values


by_day = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
by_night = settings(by_day, max_examples=200)


@by_day
@given(parts=configs, overrides=overrides)
def test_explain_lists_exactly_what_came_out_otherwise(parts, overrides, model_dir, registry, cpu):
    check_explanation(parts, overrides, model_dir, registry, cpu)


@pytest.mark.nightly
@by_night
@given(parts=configs, overrides=overrides)
def test_explain_lists_it_for_many_configs(parts, overrides, model_dir, registry, cpu):
    check_explanation(parts, overrides, model_dir, registry, cpu)


def check_explanation(parts, overrides, model_dir, registry, cpu):
    layered = load_config(assemble(parts, model_dir), overrides=overrides)
    explanation = explain(layered, registry, cpu)
    assume(explanation.resolved is not None)
    printed = json.loads(json.dumps(as_data(explanation)))
    runs = effective(explanation.resolved)
    differing = {key for key, asked in layered.asked().items() if asked != runs.get(key)}
    assert {decision["key"] for decision in printed["decisions"]} == differing
    for decision in printed["decisions"]:
        assert decision["asked"] == layered.asked()[decision["key"]]
        assert decision["got"] == runs.get(decision["key"])
        assert decision["reason"]


@by_day
@given(parts=configs)
def test_a_resolved_tree_resolves_to_itself(parts, model_dir, registry, cpu):
    check_resolved_tree(parts, model_dir, registry, cpu)


@pytest.mark.nightly
@by_night
@given(parts=configs)
def test_many_resolved_trees_resolve_to_themselves(parts, model_dir, registry, cpu):
    check_resolved_tree(parts, model_dir, registry, cpu)


def check_resolved_tree(parts, model_dir, registry, cpu):
    explanation = explain(load_config(assemble(parts, model_dir)), registry, cpu)
    assume(explanation.resolved is not None)
    again = resolve(load_config(explanation.resolved.values), registry, cpu)
    assert again.decisions == ()
    assert again.values == explanation.resolved.values
    assert again.components() == explanation.resolved.components()


@pytest.mark.parametrize("key", ["scheduler.max_num_seqs", "model.dtype", "attention.gather_kib"])
def test_values_of_the_tree_are_what_runs(resolve_tiny, key):
    resolved = resolve_tiny(attention="sdpa")
    assert get(resolved.values, tuple(key.split("."))) == effective(resolved)[key]
