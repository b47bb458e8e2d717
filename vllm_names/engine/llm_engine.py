"""`LLMEngine` with the calls of vLLM's."""

from __future__ import annotations

from typing import Any, Self

from dovetail.contracts.sampling import SamplingParams
from dovetail.engine import engine
from dovetail.engine.input_processor import ProcessedInput, Prompt
from dovetail.tokenization import Tokenizer
from dovetail.vllm import missing
from dovetail.vllm.engine.arg_utils import EngineArgs
from dovetail.vllm.sampling_params import SamplingParams as MutableSamplingParams
from dovetail.vllm.sampling_params import as_mutable
from dovetail.vllm.v1.metrics.reader import Metric
from dovetail.vllm.v1.metrics.sink import MetricsSink

ADD_REQUEST_REASONS = {
    "lora_request": missing.LORA,
    "prompt_adapter_request": "vLLM itself has dropped prompt adapters",
    "tokenization_kwargs": "tokenize the prompt with get_tokenizer() and send prompt_token_ids",
    "trace_headers": "traces come with a telemetry sink for OpenTelemetry",
    "prompt_text": "give prompt={'prompt_token_ids': ids, 'prompt': text}",
    "inputs": "it is called prompt",
    "data_parallel_rank": "an engine is one replica; data parallel is not there yet",
}


class LLMEngine(engine.LLMEngine):
    """Dovetail's `LLMEngine` under vLLM's names."""

    _metrics: MetricsSink | None = None

    @classmethod
    def from_config(cls, *args: Any, **keywords: Any) -> Self:
        """As Dovetail's. With `disable_log_stats=False`, `get_metrics` has something to say."""
        counts = keywords.pop("disable_log_stats", None) is False
        made = super().from_config(*args, **keywords)
        if counts:
            made._metrics = MetricsSink(made)
            made.add_telemetry_sink(made._metrics)
        return made

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, usage_context: object = None, **other: Any) -> Self:
        """An engine from `EngineArgs`. Raises as `from_config`."""
        missing.refuse_given(
            "LLMEngine.from_engine_args", other, {"stat_loggers": "measurements go to the sinks that `telemetry` names"}
        )
        return cls.from_config(**engine_args.keywords())

    def add_request(
        self,
        request_id: str | int,
        prompt: Prompt | ProcessedInput,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        lora_request: None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        **other: Any,
    ) -> None:
        """Queues a request; an id that is a number becomes text. Raises `RequestError`."""
        missing.refuse_given("add_request", {"lora_request": lora_request, **other}, ADD_REQUEST_REASONS)
        super().add_request(
            str(request_id), prompt, params, priority=priority, arrival_time=arrival_time, cache_salt=cache_salt
        )

    def default_sampling_params(self) -> MutableSamplingParams:
        """What the model's generation config recommends, to be changed."""
        return as_mutable(super().default_sampling_params())

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None with tokenizer_mode none."""
        return self.tokenizer

    def get_metrics(self) -> list[Metric]:
        """What was counted since the start. Raises `RequestError` unless the engine was made with
        `disable_log_stats=False`."""
        if self._metrics is None:
            missing.refuse("get_metrics", "nothing was counted: make the engine with disable_log_stats=False")
        return self._metrics.metrics()

    def wake_up(self, tags: list[str] | None = None, *, new_weights: bool = False) -> None:
        """As `dovetail.LLMEngine.wake_up`, for all memory. Raises `RequestError` for `tags` that name a part of it."""
        if tags is not None and {"weights", "kv_cache"} - set(tags):
            missing.refuse(f"wake_up(tags={tags!r})", "weights and KV cache wake together: leave tags out")
        super().wake_up(new_weights=new_weights)

    def collective_rpc(self, *_: Any, **__: Any) -> None:
        """Refused."""
        missing.refuse("collective_rpc", missing.REMOTE_CODE)

    def apply_model(self, *_: Any, **__: Any) -> None:
        """Refused."""
        missing.refuse("apply_model", missing.REMOTE_CODE)

    def start_profile(self) -> None:
        """Refused."""
        missing.refuse("start_profile", missing.PROFILER)

    def stop_profile(self) -> None:
        """Refused."""
        missing.refuse("stop_profile", missing.PROFILER)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(missing.missing_member(self, name))
