"""The `prometheus` sink: vLLM's names, labels and buckets, and the right numbers, as prometheus_client's parser reads
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from dovetail import LLM, SamplingParams
from dovetail.contracts.telemetry import (
    ConnectorTotals,
    DrafterTotals,
    EngineState,
    Exposition,
    FirstToken,
    RequestStats,
    SinkTotals,
    StepStats,
)
from dovetail.plugins.telemetry.prometheus.arms import MAX_ARMS
from dovetail.plugins.telemetry.prometheus.names import bounds_1_2_5
from dovetail.plugins.telemetry.prometheus.sink import PrometheusOptions, PrometheusSink
from dovetail.testing.telemetry_suite import ENGINE, STATE, TelemetrySinkSuite, assignment
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

MakeStep = Callable[..., StepStats]
MakeRequest = Callable[..., RequestStats]

VLLM_NAMES = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:engine_sleep_state": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:external_prefix_cache_queries": "counter",
    "vllm:external_prefix_cache_hits": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:spec_decode_num_drafts": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "counter",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:time_per_output_token_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_prefill_kv_computed_tokens": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_params_max_tokens": "histogram",
}
"""As vLLM's V1 engine exposes them, by their types."""
GEN_AI_NAMES = {
    "gen_ai_server_request_duration_seconds",
    "gen_ai_server_time_to_first_token_seconds",
    "gen_ai_server_time_per_output_token_seconds",
    "gen_ai_client_token_usage",
}


class TestConforms(TelemetrySinkSuite):
    plugin = PrometheusSink


class Metrics:
    """An exposition, read."""

    def __init__(self, exposition: Exposition):
        self.families = {family.name: family for family in text_string_to_metric_families(exposition.body.decode())}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """The value of the one sample that has these labels among its own."""
        [found] = [s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()]
        return float(found)

    def labels(self, name: str) -> list[dict[str, str]]:
        return [sample.labels for sample in self.samples if sample.name == name]


PLAIN = replace(ENGINE, drafter=None)


def started(**options: Any) -> PrometheusSink:
    sink = PrometheusSink(PrometheusOptions(**options))
    sink.on_start(PLAIN)
    return sink


def read(sink: PrometheusSink, state: EngineState = STATE) -> Metrics:
    return Metrics(sink.exposition(state))


def test_names_and_types_are_those_of_vllm() -> None:
    metrics = read(started())
    found = {name: family.type for name, family in metrics.families.items()}
    assert {name: kind for name, kind in found.items() if name.startswith("vllm:")} == VLLM_NAMES
    assert {name for name in found if name.startswith("gen_ai_")} == GEN_AI_NAMES


def test_the_page_for_operators_names_every_metric() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "telemetry.md").read_text()
    families = read(started()).families
    names = [name + "_total" if family.type == "counter" else name for name, family in families.items()]
    assert [name for name in names if f"`{name}`" not in page] == []


def test_all_metrics_have_the_labels_of_vllm() -> None:
    metrics = read(started(model_name="mine", engine="3"))
    for sample in metrics.samples:
        model = sample.labels["gen_ai_request_model" if sample.name.startswith("gen_ai_") else "model_name"]
        assert (model, sample.labels["engine"]) == ("mine", "3"), sample
    assert {labels["model_name"] for labels in read(started()).labels("vllm:num_requests_running")} == {ENGINE.model}


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "\\n", "é🕊", "a,b={c}", ""])
def test_labels_may_hold_any_text(name: str) -> None:
    assert read(started(model_name=name)).labels("vllm:num_requests_running")[0]["model_name"] == name


def test_every_finish_reason_is_there_before_a_request_ended() -> None:
    reasons = {labels["finished_reason"] for labels in read(started()).labels("vllm:request_success_total")}
    assert reasons == {"stop", "length", "abort", "error"}


def test_a_steps_numbers_add_up(step_stats: MakeStep) -> None:
    sink = started()
    for time in (100.0, 100.25):
        sink.on_step(step_stats(time=time, num_prompt_tokens=40, num_generated_tokens=3, num_preempted=1))
    metrics = read(sink)
    assert metrics.value("vllm:prompt_tokens_total") == 80
    assert metrics.value("vllm:generation_tokens_total") == 6
    assert metrics.value("vllm:num_preemptions_total") == 2
    assert metrics.value("vllm:iteration_tokens_total_sum") == 86
    assert metrics.value("dovetail:step_duration_seconds_count") == 2


def test_each_decoded_sequence_waited_since_the_step_before(step_stats: MakeStep) -> None:
    """As many observations as sequences, each of the time between the ends of two steps."""
    sink = started()
    sink.on_step(step_stats(time=100.0, duration=0.5, num_decoded=0))
    sink.on_step(step_stats(time=100.25, duration=0.1, num_decoded=7))
    sink.on_step(step_stats(time=100.75, duration=0.1, num_decoded=2))
    metrics = read(sink)
    for name in ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"):
        assert metrics.value(f"{name}_count") == 9
        assert metrics.value(f"{name}_sum") == pytest.approx(7 * 0.25 + 2 * 0.5)
        assert metrics.value(f"{name}_bucket", le="0.3") == 7
        assert metrics.value(f"{name}_bucket", le="0.5") == 9


def test_the_first_step_that_is_heard_of_counts_by_its_duration(step_stats: MakeStep) -> None:
    """A sink may be added while requests run."""
    sink = started()
    sink.on_step(step_stats(time=100.0, duration=0.5, num_decoded=1))
    assert read(sink).value("vllm:inter_token_latency_seconds_sum") == 0.5


def test_a_real_engine_counts_what_its_users_get(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, tiny_config("llama", max_position_embeddings=512))
    params = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.0)
    with LLM(
        model={"path": str(tmp_path), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 256},
        cache={"block_size": 4, "num_blocks": 400},
        executor={"threads": 1},
        telemetry=[{"name": "prometheus", "model_name": "tiny"}],
    ) as llm:
        outputs = llm.generate([[5, 6, 7], list(range(3, 60))], params, use_tqdm=False)
        metrics = Metrics(llm.engine.metrics())
    assert metrics.value("vllm:generation_tokens_total") == 18
    assert metrics.value("vllm:prompt_tokens_total") == 3 + 57
    assert metrics.value("vllm:request_success_total", finished_reason="length", model_name="tiny") == 2
    assert metrics.value("vllm:inter_token_latency_seconds_count") == 2 * 8
    assert metrics.value("vllm:time_to_first_token_seconds_count") == 2
    for name, seconds in (
        ("vllm:e2e_request_latency_seconds", [o.metrics.finished_time - o.metrics.arrival_time for o in outputs]),
        ("vllm:time_to_first_token_seconds", [o.metrics.first_token_time - o.metrics.arrival_time for o in outputs]),
    ):
        assert metrics.value(f"{name}_sum") == pytest.approx(sum(seconds))
    # Both sequences are in all steps, so that what they waited is what their steps took.
    decoding = [o.metrics.finished_time - o.metrics.first_token_time for o in outputs]
    assert metrics.value("vllm:inter_token_latency_seconds_sum") == pytest.approx(sum(decoding))


def test_a_requests_times_and_tokens(make_request_stats: MakeRequest) -> None:
    sink = started()
    sink.on_request(
        make_request_stats(
            arrival_time=1.0,
            first_scheduled_time=1.5,
            first_token_time=2.5,
            finish_time=4.5,
            num_prompt_tokens=12,
            num_cached_tokens=8,
            num_generated_tokens=5,
            max_tokens=64,
        )
    )
    metrics = read(sink)
    expected = {
        "vllm:request_queue_time_seconds": 0.5,
        "vllm:request_prefill_time_seconds": 1.0,
        "vllm:request_decode_time_seconds": 2.0,
        "vllm:request_inference_time_seconds": 3.0,
        "vllm:e2e_request_latency_seconds": 3.5,
        "vllm:request_time_per_output_token_seconds": 0.5,
        "vllm:request_prompt_tokens": 12,
        "vllm:request_prefill_kv_computed_tokens": 4,
        "vllm:request_generation_tokens": 5,
        "vllm:request_params_n": 1,
        "vllm:request_params_max_tokens": 64,
        "gen_ai_server_request_duration_seconds": 3.5,
        "gen_ai_server_time_per_output_token_seconds": 0.5,
    }
    assert {name: metrics.value(f"{name}_sum") for name in expected} == expected
    assert all(metrics.value(f"{name}_count") == 1 for name in expected)
    assert metrics.value("gen_ai_client_token_usage_sum", gen_ai_token_type="input") == 12
    assert metrics.value("gen_ai_client_token_usage_sum", gen_ai_token_type="output") == 5
    assert metrics.value("vllm:request_success_total", finished_reason="stop") == 1


def test_the_time_per_token_of_several_completions_is_that_of_each(make_request_stats: MakeRequest) -> None:
    sink = started()
    sink.on_request(make_request_stats(n=2, num_generated_tokens=10, first_token_time=2.0, finish_time=4.0))
    assert read(sink).value("vllm:request_time_per_output_token_seconds_sum") == pytest.approx(2 / 4)


def test_what_a_request_did_not_reach_is_not_observed(make_request_stats: MakeRequest) -> None:
    sink = started()
    sink.on_request(
        make_request_stats(
            first_scheduled_time=None, first_token_time=None, finish_reason="abort", num_generated_tokens=0
        )
    )
    metrics = read(sink)
    assert metrics.value("vllm:e2e_request_latency_seconds_count") == 1
    for phase in ("queue", "prefill", "decode", "inference"):
        assert metrics.value(f"vllm:request_{phase}_time_seconds_count") == 0


def test_first_tokens_are_seen_before_the_request_ends(step_stats: MakeStep) -> None:
    sink = started()
    sink.on_step(step_stats(first_tokens=(FirstToken(latency=0.25, drafter="a"), FirstToken(latency=0.75))))
    metrics = read(sink)
    for name in ("vllm:time_to_first_token_seconds_sum", "gen_ai_server_time_to_first_token_seconds_sum"):
        assert metrics.value(name, drafter="a") == 0.25
        assert metrics.value(name, drafter="") == 0.75


def test_arms_are_counted_apart(make_request_stats: MakeRequest) -> None:
    sink = started()
    for drafter, version, drafted in (("a", 0, 4), ("a", 1, 8), (None, 1, 0)):
        sink.on_request(
            make_request_stats(drafter=drafter, weight_version=version, num_drafted=drafted, num_accepted=drafted // 2)
        )
    metrics = read(sink)
    assert metrics.value("dovetail:request_draft_tokens_total", drafter="a", weight_version="1") == 8
    assert metrics.value("dovetail:request_accepted_tokens_total", drafter="a", weight_version="0") == 2
    assert metrics.value("vllm:e2e_request_latency_seconds_count", drafter="", weight_version="1") == 1
    assert {labels["adapter"] for labels in metrics.labels("vllm:e2e_request_latency_seconds_count")} == {""}


def test_the_arm_that_was_met_longest_ago_makes_room(make_request_stats: MakeRequest) -> None:
    sink = started()
    most = MAX_ARMS + len(ENGINE.experiments[0].arms)
    for version in range(1, most):
        sink.on_request(make_request_stats(weight_version=version))
    sink.on_request(make_request_stats(weight_version=0))
    sink.on_request(make_request_stats(weight_version=most))
    versions = {labels["weight_version"] for labels in read(sink).labels("vllm:request_prompt_tokens_count")}
    assert versions == {str(version) for version in range(most + 1)} - {"1"}


def test_arms_of_experiments_are_labels(step_stats: MakeStep, make_request_stats: MakeRequest) -> None:
    sink = started()
    sink.on_request(make_request_stats(assignment=assignment(0), num_drafted=4, num_accepted=1))
    sink.on_request(make_request_stats(assignment=assignment(1), num_drafted=8, num_accepted=6))
    sink.on_request(make_request_stats())
    sink.on_step(step_stats(first_tokens=(FirstToken(latency=0.25, assignment=assignment(1)), FirstToken(latency=2.0))))
    metrics = read(sink)
    for arm, drafted, accepted in (("plain", 4, 1), ("lookup", 8, 6)):
        assert metrics.value("dovetail:request_draft_tokens_total", experiment="drafts", arm=arm) == drafted
        assert metrics.value("dovetail:request_accepted_tokens_total", experiment="drafts", arm=arm) == accepted
        assert metrics.value("vllm:e2e_request_latency_seconds_count", experiment="drafts", arm=arm) == 1
    assert metrics.value("vllm:time_to_first_token_seconds_sum", experiment="drafts", arm="lookup") == 0.25
    assert metrics.value("vllm:time_to_first_token_seconds_sum", experiment="", arm="", drafter="") == 2.0


def test_errors_are_told_apart_by_type(make_request_stats: MakeRequest) -> None:
    sink = started()
    sink.on_request(make_request_stats(finish_reason="error", error_type="ValueError"))
    sink.on_request(make_request_stats())
    metrics = read(sink)
    name = "gen_ai_server_request_duration_seconds_count"
    assert metrics.value(name, error_type="ValueError") == metrics.value(name, error_type="") == 1
    for number in range(100):
        sink.on_request(make_request_stats(finish_reason="error", error_type=f"Error{number}"))
    assert len(read(sink).labels(name)) < 20
    assert read(sink).value(name, error_type="_OTHER") > 80


def test_adapters_are_shown_where_there_may_be_some() -> None:
    state = replace(STATE, running_adapters=("a", "b"), waiting_adapters=("c",))
    name = "vllm:lora_requests_info"
    sink = PrometheusSink(PrometheusOptions())
    sink.on_start(replace(PLAIN, max_loras=4))
    [labels] = read(sink, state).labels(name)
    wanted = {"max_lora": "4", "running_lora_adapters": "a,b", "waiting_lora_adapters": "c"}
    assert wanted.items() <= labels.items()
    assert not read(started(), state).labels(name)


def test_the_state_is_shown_as_it_is() -> None:
    drafter = DrafterTotals(
        num_draft_rounds=5, num_drafted=20, num_accepted=9, accepted_per_position=(5, 4), num_errors=1
    )
    state = EngineState(
        num_running=3,
        num_waiting=2,
        kv_blocks_used=7,
        kv_blocks_total=20,
        prefix_query_tokens=80,
        prefix_hit_tokens=20,
        external_query_tokens=60,
        external_hit_tokens=48,
        weight_version=4,
        is_asleep=True,
        drafters={"a": drafter},
        sinks=(SinkTotals(name="jsonl", seconds=0.5, is_on=False),),
    )
    metrics = read(started(), state)
    values: Mapping[str, float] = {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 2,
        "vllm:kv_cache_usage_perc": 0.35,
        "vllm:prefix_cache_queries_total": 80,
        "vllm:prefix_cache_hits_total": 20,
        "vllm:external_prefix_cache_queries_total": 60,
        "vllm:external_prefix_cache_hits_total": 48,
        "dovetail:weight_version": 4,
        "vllm:engine_sleep_state": 0,
        "vllm:spec_decode_num_drafts_total": 5,
        "vllm:spec_decode_num_draft_tokens_total": 20,
        "vllm:spec_decode_num_accepted_tokens_total": 9,
        "dovetail:drafter_errors_total": 1,
        "dovetail:telemetry_sink_seconds_total": 0.5,
        "dovetail:telemetry_sink_on": 0,
    }
    assert {name: metrics.value(name) for name in values} == values
    assert metrics.value("vllm:spec_decode_num_accepted_tokens_per_pos_total", position="1", drafter="a") == 4


def test_the_kv_connector_is_shown_where_there_is_one() -> None:
    totals = ConnectorTotals(
        is_on=False,
        num_saved_blocks=7,
        num_loaded_blocks=6,
        num_dropped_blocks=5,
        num_failures=4,
        num_corrupt=3,
        num_timeouts=2,
    )
    values: Mapping[str, float] = {
        "dovetail:kv_connector_on": 0,
        "dovetail:kv_connector_saved_blocks_total": 7,
        "dovetail:kv_connector_loaded_blocks_total": 6,
        "dovetail:kv_connector_dropped_blocks_total": 5,
        "dovetail:kv_connector_failed_records_total": 4,
        "dovetail:kv_connector_corrupt_records_total": 3,
        "dovetail:kv_connector_load_timeouts_total": 2,
    }
    metrics = read(started(), replace(STATE, connector=totals))
    assert {name: metrics.value(name) for name in values} == values
    assert not any(read(started(), STATE).labels(name) for name in values)


def test_an_engine_without_blocks_uses_none_of_them() -> None:
    state = replace(STATE, kv_blocks_used=0, kv_blocks_total=0)
    assert read(started(), state).value("vllm:kv_cache_usage_perc") == 0


def test_counts_go_on_where_the_kv_memory_is_replaced(make_request_stats: MakeRequest) -> None:
    sink = started()
    sink.on_request(make_request_stats())
    sink.on_start(replace(PLAIN, num_blocks=77))
    metrics = read(sink)
    assert [labels["num_gpu_blocks"] for labels in metrics.labels("vllm:cache_config_info")] == ["77"]
    assert metrics.value("vllm:request_prompt_tokens_count") == 1


def test_engines_of_one_process_have_counts_of_their_own(make_request_stats: MakeRequest) -> None:
    before = {metric.name for metric in REGISTRY.collect()}
    first, second = started(), started()
    first.on_request(make_request_stats())
    assert read(second).value("vllm:request_prompt_tokens_count") == 0
    assert {metric.name for metric in REGISTRY.collect()} == before


def test_buckets_of_token_counts_end_at_the_models_length() -> None:
    assert bounds_1_2_5(100) == (1, 2, 5, 10, 20, 50, 100)
    assert bounds_1_2_5(4096)[-3:] == (500, 1000, 2000)
