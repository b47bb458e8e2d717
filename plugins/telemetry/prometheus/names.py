"""Names, helps and buckets of the histograms. Names that begin with "vllm:" are vLLM's, with vLLM's buckets; those that
begin with "gen_ai_" are OpenTelemetry's semantic conventions 1.41.0, written as Prometheus writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Definition:
    """A histogram's name, help and upper bounds."""

    name: str
    help: str
    bounds: Sequence[float]


_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_GEN_AI_REQUEST_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_GEN_AI_FIRST_TOKEN_S = (*(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),)
_GEN_AI_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_GEN_AI_TOKENS = tuple(float(4**power) for power in range(14))


def bounds_1_2_5(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, ... up to `most`."""
    bounds = (float(factor * 10**power) for power in range(len(str(most))) for factor in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= most)


STEP_TOKENS = Definition("vllm:iteration_tokens_total", "Tokens of prompts and outputs in a step.", _STEP_TOKENS)
STEP_DURATION = Definition("dovetail:step_duration_seconds", "Time from scheduling to committed tokens.", _STEP_S)
INTER_TOKEN = Definition(
    "vllm:inter_token_latency_seconds", "Time that a sequence waited for its next tokens.", _TOKEN_S
)
OLD_INTER_TOKEN = Definition(
    "vllm:time_per_output_token_seconds",
    "The same as vllm:inter_token_latency_seconds, under its older name.",
    _TOKEN_S,
)
FIRST_TOKEN = Definition(
    "vllm:time_to_first_token_seconds", "Time from arrival to the first output token.", _FIRST_TOKEN_S
)
PER_TOKEN = Definition(
    "vllm:request_time_per_output_token_seconds", "Mean time between the output tokens of a request.", _TOKEN_S
)
LATENCY = Definition("vllm:e2e_request_latency_seconds", "Time from arrival to the end of a request.", _REQUEST_S)
QUEUE = Definition("vllm:request_queue_time_seconds", "Time from arrival to the first step of a request.", _REQUEST_S)
PREFILL = Definition("vllm:request_prefill_time_seconds", "Time from the first step to the first token.", _REQUEST_S)
DECODE = Definition("vllm:request_decode_time_seconds", "Time from the first token to the end.", _REQUEST_S)
INFERENCE = Definition("vllm:request_inference_time_seconds", "Time from the first step to the end.", _REQUEST_S)
COMPLETIONS = Definition("vllm:request_params_n", "Completions that a request asked for.", (1, 2, 5, 10, 20))
GEN_AI_LATENCY = Definition(
    "gen_ai_server_request_duration_seconds", "Time from arrival to the end of a request.", _GEN_AI_REQUEST_S
)
GEN_AI_FIRST_TOKEN = Definition(
    "gen_ai_server_time_to_first_token_seconds", "Time from arrival to the first output token.", _GEN_AI_FIRST_TOKEN_S
)
GEN_AI_PER_TOKEN = Definition(
    "gen_ai_server_time_per_output_token_seconds",
    "Mean time between the output tokens of a request, behind the first.",
    _GEN_AI_TOKEN_S,
)
GEN_AI_TOKENS = Definition("gen_ai_client_token_usage", "Tokens of a request, by type.", _GEN_AI_TOKENS)


def token_definitions(max_model_len: int) -> tuple[Definition, Definition, Definition, Definition]:
    """Prompt tokens, those of them that were computed, output tokens, and the most that may be output."""
    bounds = bounds_1_2_5(max_model_len)
    return (
        Definition("vllm:request_prompt_tokens", "Prompt tokens of a request.", bounds),
        Definition(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens that did not come from the prefix cache.", bounds
        ),
        Definition("vllm:request_generation_tokens", "Output tokens of a request, of all its completions.", bounds),
        Definition("vllm:request_params_max_tokens", "max_tokens of a request.", bounds),
    )
