"""`LLMEngine` with the calls of vLLM's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any, Self

from dovetail.contracts.lora import LoRARequest
from dovetail.contracts.outputs import RequestOutput
from dovetail.contracts.pooling_params import PoolingParams
from dovetail.contracts.prompts import Prompt
from dovetail.contracts.sampling import SamplingParams
from dovetail.engine import engine
from dovetail.engine.input_processor import ProcessedInput
from dovetail.engine.tokenization.tokenizer import Tokenizer
from dovetail.vllm import missing
from dovetail.vllm.engine.arg_utils import EngineArgs
from dovetail.vllm.sampling_params import SamplingParams as MutableSamplingParams
from dovetail.vllm.sampling_params import as_mutable
from dovetail.vllm.v1.metrics.reader import Metric
from dovetail.vllm.v1.metrics.sink import MetricsSink


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
        missing.refuse_given("LLMEngine.from_engine_args", other)
        return cls.from_config(**engine_args.keywords())

    def add_request(
        self,
        request_id: str | int,
        prompt: Prompt | ProcessedInput,
        params: SamplingParams | PoolingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        prompt_text: None = None,
        *,
        cache_salt: str | None = None,
        user: str | None = None,
        **other: Any,
    ) -> None:
        """Queues a request; an id that is a number becomes text. Raises `RequestError`."""
        by_position = {
            "tokenization_kwargs": tokenization_kwargs,
            "prompt_text": prompt_text,
        }
        missing.refuse_given("add_request", by_position | other)
        super().add_request(
            id_text(request_id),
            prompt,
            params,
            priority=priority,
            arrival_time=arrival_time,
            cache_salt=cache_salt,
            trace_headers=trace_headers,
            user=user,
            lora_request=lora_request,
        )

    def abort_request(self, request_ids: str | int | Iterable[str | int]) -> list[RequestOutput]:
        """As `dovetail.LLMEngine.abort_request`; ids that are numbers become text."""
        return super().abort_request(id_texts(request_ids))

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

    def collective_rpc(self, *_: Any, **__: Any) -> None:
        missing.refuse("collective_rpc", missing.REMOTE_CODE)

    def apply_model(self, *_: Any, **__: Any) -> None:
        missing.refuse("apply_model", missing.REMOTE_CODE)

    def start_profile(self) -> None:
        missing.refuse("start_profile", missing.PROFILER)

    def stop_profile(self) -> None:
        missing.refuse("stop_profile", missing.PROFILER)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(missing.missing_member(self, name))


def id_text(request_id: Any) -> Any:
    """Returns a number as text; other values are refused later, where they are used."""
    is_number = isinstance(request_id, Integral) and not isinstance(request_id, bool)
    return str(request_id) if is_number else request_id


def id_texts(request_ids: Any) -> Any:
    """The same of one id or of many."""
    if isinstance(request_ids, Iterable) and not isinstance(request_ids, str):
        return [id_text(request_id) for request_id in request_ids]
    return id_text(request_ids)


__getattr__ = missing.answering(__name__)
