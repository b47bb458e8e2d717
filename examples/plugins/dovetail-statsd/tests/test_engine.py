"""What arrives over UDP is what the engine itself counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dovetail import LLM, SamplingParams
from dovetail.testing.tiny_models import save_tiny_model, tiny_config


def counted(llm: LLM) -> dict[str, float]:
    """Counters of the bundled sink `prometheus`, labels aside."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(llm.engine.metrics().body.decode()):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


@pytest.mark.parametrize(
    "executor",
    [{"name": "cpu", "threads": 1}, pytest.param({"name": "multiproc", "tensor_parallel": 2}, marks=pytest.mark.slow)],
    ids=["cpu", "multiproc"],
)
def test_what_arrives_is_what_the_engine_counts(tmp_path: Path, receiver: Any, executor: dict[str, Any]) -> None:
    """With preemptions, shared prefixes and drafts, and steps over several flushes."""
    save_tiny_model(tmp_path, tiny_config("llama"))
    config: dict[str, Any] = {
        "model": {"path": str(tmp_path), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 64},
        "cache": {"block_size": 4, "num_blocks": 24},
        "executor": executor,
        "speculative": {"drafters": {"lookup": {"name": "ngram", "num_tokens": 3}}, "default": "lookup"},
        "telemetry": ["prometheus", {"name": "statsd", "host": "127.0.0.1", "port": receiver.port, "flush_s": 0.01}],
    }
    prompts = [[3, 5, 7, 11] * 4, [3, 5, 7, 11] * 4 + [2], [9, 9, 9], [4, 4, 4, 4, 4, 4]]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (20, 30, 5, 25)]
    with LLM(**config) as llm:
        for _ in range(2):
            llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        expected = counted(llm)
    found = receiver.counts()
    pairs = {
        "prompt_tokens": "vllm:prompt_tokens_total",
        "generated_tokens": "vllm:generation_tokens_total",
        "preemptions": "vllm:num_preemptions_total",
        "prefix_query_tokens": "vllm:prefix_cache_queries_total",
        "prefix_hit_tokens": "vllm:prefix_cache_hits_total",
        "draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
        "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
        "requests.length": "vllm:request_success_total",
        "steps": "dovetail:step_duration_seconds_count",
    }
    assert {ours: found.get(f"dovetail.{ours}", 0.0) for ours in pairs} == {
        ours: expected[theirs] for ours, theirs in pairs.items()
    }
    assert found["dovetail.requests.length"] == 8
    assert found["dovetail.prefix_hit_tokens"] > 0
    assert found["dovetail.draft_tokens"] > 0
    # Rounded to microseconds, each.
    for ours, theirs in (
        ("step_duration", "dovetail:step_duration_seconds_sum"),
        ("request_duration", "vllm:e2e_request_latency_seconds_sum"),
        ("time_to_first_token", "vllm:time_to_first_token_seconds_sum"),
    ):
        assert sum(receiver.values(f"dovetail.{ours}")) == pytest.approx(1000 * expected[theirs], abs=0.5), ours
