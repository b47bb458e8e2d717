"""What the metrics of an engine are called and labelled, and where their numbers come from."""

from __future__ import annotations

import time
from dataclasses import dataclass

from dovetail.contracts.telemetry import EngineDescription, EngineState
from dovetail.plugins.telemetry.prometheus import names
from dovetail.plugins.telemetry.prometheus.arms import Arm, ArmLabels, Arms
from dovetail.plugins.telemetry.prometheus.connector import write_connector
from dovetail.plugins.telemetry.prometheus.histogram import Histogram
from dovetail.plugins.telemetry.prometheus.page import Labels, Page
from dovetail.plugins.telemetry.prometheus.ranks import write_ranks

_ARM = ("drafter", "adapter", "weight_version", "experiment", "arm")


@dataclass(slots=True)
class Counted:
    """What was counted since the engine started."""

    arms: Arms
    step_tokens: Histogram
    step_durations: Histogram
    inter_token: Histogram
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0


class Writer:
    """Writes the metrics of one engine."""

    def __init__(self, counted: Counted, description: EngineDescription, model_name: str, engine: str):
        self._counted = counted
        self._description = description
        self._own: Labels = (("model_name", model_name), ("engine", engine))
        self._gen_ai: Labels = (
            ("gen_ai_operation_name", "text_completion"),
            ("gen_ai_provider_name", "dovetail"),
            ("gen_ai_request_model", model_name),
            ("engine", engine),
        )

    def write(self, state: EngineState) -> bytes:
        """All metrics, with this state."""
        page = Page()
        self._write_state(page, state)
        self._write_sinks(page, state)
        write_connector(page, self._own, state.connector)
        write_ranks(page, self._own, state.ranks)
        self._write_steps(page)
        self._write_speculation(page, state)
        arms = self._counted.arms.items()
        self._write_arms(page, arms)
        self._write_gen_ai(page, arms)
        return page.render()

    def _write_state(self, page: Page, state: EngineState) -> None:
        own, kv = self._own, self._description
        usage = state.kv_blocks_used / state.kv_blocks_total if state.kv_blocks_total else 0.0
        page.gauge("vllm:num_requests_running", "Sequences in the batch.", [(own, state.num_running)])
        page.gauge("vllm:num_requests_waiting", "Sequences that wait to be computed.", [(own, state.num_waiting)])
        page.gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all.", [(own, usage)])
        page.counter(
            "vllm:prefix_cache_queries_total",
            "Prompt tokens looked up in the prefix cache.",
            [(own, state.prefix_query_tokens)],
        )
        page.counter(
            "vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", [(own, state.prefix_hit_tokens)]
        )
        page.counter(
            "vllm:external_prefix_cache_queries_total",
            "Prompt tokens asked of the KV connector.",
            [(own, state.external_query_tokens)],
        )
        page.counter(
            "vllm:external_prefix_cache_hits_total",
            "Prompt tokens loaded by the KV connector.",
            [(own, state.external_hit_tokens)],
        )
        memory = {
            "block_size": kv.block_size,
            "cache_dtype": kv.kv_dtype,
            "enable_prefix_caching": kv.prefix_caching,
            "num_gpu_blocks": kv.num_blocks,
            "num_cpu_blocks": kv.num_host_blocks,
        }
        labels = (*own, *((name, str(value)) for name, value in memory.items()))
        page.gauge("vllm:cache_config_info", "The KV memory, as labels.", [(labels, 1)])
        awake = (*own, ("sleep_state", "awake"))
        page.gauge(
            "vllm:engine_sleep_state", "1 where the engine is in this state.", [(awake, int(not state.is_asleep))]
        )
        if self._description.max_loras:
            self._write_adapters(page, state)
        page.gauge("dovetail:weight_version", "Version of the weights.", [(own, state.weight_version)])
        checksum = (*own, ("checksum", state.weight_checksum))
        page.gauge("dovetail:weights_info", "The weights, as labels.", [(checksum, 1)])

    def _write_adapters(self, page: Page, state: EngineState) -> None:
        adapters = (
            ("max_lora", str(self._description.max_loras)),
            ("waiting_lora_adapters", ",".join(state.waiting_adapters)),
            ("running_lora_adapters", ",".join(state.running_adapters)),
        )
        page.gauge(
            "vllm:lora_requests_info",
            "The adapters that requests have now, as labels; the value is the time.",
            [((*self._own, *adapters), time.time())],
        )

    def _write_sinks(self, page: Page, state: EngineState) -> None:
        sinks = [((*self._own, ("sink", sink.name)), sink) for sink in state.sinks]
        page.counter(
            "dovetail:telemetry_sink_seconds_total",
            "Time that the engine spent in a telemetry sink.",
            [(labels, sink.seconds) for labels, sink in sinks],
        )
        page.gauge(
            "dovetail:telemetry_sink_on",
            "0 for a sink that raised and was switched off.",
            [(labels, int(sink.is_on)) for labels, sink in sinks],
        )

    def _write_steps(self, page: Page) -> None:
        own, counted = self._own, self._counted
        page.counter("vllm:num_preemptions_total", "Preemptions of sequences.", [(own, counted.preemptions)])
        page.counter("vllm:prompt_tokens_total", "Prompt tokens that were computed.", [(own, counted.prompt_tokens)])
        page.counter("vllm:generation_tokens_total", "Output tokens.", [(own, counted.generated_tokens)])
        for definition, histogram in (
            (names.STEP_TOKENS, counted.step_tokens),
            (names.STEP_DURATION, counted.step_durations),
            (names.INTER_TOKEN, counted.inter_token),
            (names.OLD_INTER_TOKEN, counted.inter_token),
        ):
            page.histogram(definition, [(own, histogram)])

    def _write_speculation(self, page: Page, state: EngineState) -> None:
        drafters = [((*self._own, ("drafter", drafter)), totals) for drafter, totals in sorted(state.drafters.items())]
        page.counter(
            "vllm:spec_decode_num_drafts_total",
            "Drafts that were verified.",
            [(labels, totals.num_draft_rounds) for labels, totals in drafters],
        )
        page.counter(
            "vllm:spec_decode_num_draft_tokens_total",
            "Draft tokens that were verified.",
            [(labels, totals.num_drafted) for labels, totals in drafters],
        )
        page.counter(
            "vllm:spec_decode_num_accepted_tokens_total",
            "Draft tokens that were accepted.",
            [(labels, totals.num_accepted) for labels, totals in drafters],
        )
        page.counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            "Drafts of which the token at this position was accepted.",
            [
                ((*labels, ("position", str(position))), count)
                for labels, totals in drafters
                for position, count in enumerate(totals.accepted_per_position)
            ],
        )
        page.counter(
            "dovetail:drafter_errors_total",
            "Sequences that went on without their drafter, since it raised.",
            [(labels, totals.num_errors) for labels, totals in drafters],
        )

    def _write_arms(self, page: Page, arms: list[tuple[ArmLabels, Arm]]) -> None:
        labelled = [((*self._own, *zip(_ARM, labels, strict=True)), arm) for labels, arm in arms]
        page.counter(
            "vllm:request_success_total",
            "Requests that ended, by reason.",
            [
                ((*labels, ("finished_reason", reason)), count)
                for labels, arm in labelled
                for reason, count in list(arm.ended.items())
            ],
        )
        page.counter(
            "dovetail:request_draft_tokens_total",
            "Verified draft tokens of requests that ended.",
            [(labels, arm.num_drafted) for labels, arm in labelled],
        )
        page.counter(
            "dovetail:request_accepted_tokens_total",
            "Accepted draft tokens of requests that ended.",
            [(labels, arm.num_accepted) for labels, arm in labelled],
        )
        for definition in arms[0][1].histograms:
            page.histogram(definition, [(labels, arm.histograms[definition]) for labels, arm in labelled])

    def _write_gen_ai(self, page: Page, arms: list[tuple[ArmLabels, Arm]]) -> None:
        labelled = [((*self._gen_ai, *zip(_ARM, labels, strict=True)), arm) for labels, arm in arms]
        for definition in arms[0][1].gen_ai_histograms:
            page.histogram(definition, [(labels, arm.gen_ai_histograms[definition]) for labels, arm in labelled])
        page.histogram(
            names.GEN_AI_TOKENS,
            [
                ((*labels, ("gen_ai_token_type", kind)), histogram)
                for labels, arm in labelled
                for kind, histogram in (("input", arm.input_tokens), ("output", arm.output_tokens))
            ],
        )
        page.histogram(
            names.GEN_AI_LATENCY,
            [
                ((*labels, ("error_type", error_type)), histogram)
                for labels, arm in labelled
                for error_type, histogram in list(arm.latencies.items())
            ],
        )
