import threading
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from dovetail.config.layers import LayeredConfig
from dovetail.config.resolved import ResolvedConfig
from dovetail.config.schema import EngineConfig
from dovetail.contracts.sampling import BeamSearchParams, SamplingParams
from dovetail.contracts.telemetry import TelemetrySink
from dovetail.engine.core import EngineCore
from dovetail.engine.input_processor import ProcessedInput, Prompt
from dovetail.engine.kv.manager import KVStatistics
from dovetail.engine.kv.pool import PrefixCacheReset
from dovetail.engine.llm import Message
from dovetail.contracts.outputs import BeamSearchOutput, Logprob, SpeculationTotals, TokenProgress
from dovetail.engine.sequence import Sequence
from dovetail.engine.tokenization import Tokenizer
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self

__all__ = [
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "LLM",
    "LLMEngine",
    "PositionLogprobs",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

class AsyncLLMEngine:
    def __init__(self, engine: LLMEngine): ...
    @classmethod
    def from_config(
        cls,
        config: str | Path | Mapping[str, Any] | LayeredConfig | None = None,
        *,
        options: Iterable[str] = (),
        **keywords: Any,
    ) -> Self: ...
    @property
    def config(self) -> ResolvedConfig: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def is_running(self) -> bool: ...
    @property
    def errored(self) -> bool: ...
    async def check_health(self) -> None: ...
    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]: ...
    async def abort(self, request_id: str) -> None: ...
    async def hold(self, request_ids: str | Iterable[str]) -> None: ...
    async def resume(self, request_ids: str | Iterable[str]) -> None: ...
    async def reset_prefix_cache(self) -> PrefixCacheReset: ...
    async def sleep(self, level: int = 1) -> int: ...
    async def wake_up(self, *, new_weights: bool = False) -> None: ...
    async def is_sleeping(self) -> bool: ...
    async def cache_statistics(self) -> KVStatistics: ...
    def shutdown(self, timeout_s: float = 30.0) -> None: ...
    def __enter__(self) -> AsyncLLMEngine: ...
    def __exit__(self, *_: object) -> None: ...


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    @property
    def finished(self) -> bool: ...
    def defer_tokens(
        self,
        tokens: list[int],
        start: int,
        stop: int,
        positions: list[PositionLogprobs] | None,
    ) -> None: ...
    def __getattr__(self, name: str) -> Any: ...


class LLM:
    engine_class: ClassVar[type[LLMEngine]] = LLMEngine
    def __init__(
        self,
        model: str | Mapping[str, Any] | None = None,
        *,
        config: str | Path | Mapping[str, Any] | LayeredConfig | None = None,
        options: Iterable[str] = (),
        **keywords: Any,
    ): ...
    engine: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]: ...
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]: ...
    def render_chat(self, messages: Sequence[Message], **template_options: Any) -> Prompt: ...
    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = True,
    ) -> list[BeamSearchOutput]: ...
    def encode(self, *_: object, **__: object) -> NoReturn: ...
    def get_tokenizer(self) -> Tokenizer | None: ...
    def get_default_sampling_params(self) -> SamplingParams: ...
    def reset_prefix_cache(self) -> PrefixCacheReset: ...
    def sleep(self, level: int = 1) -> int: ...
    def wake_up(self, *, new_weights: bool = False) -> None: ...
    def is_sleeping(self) -> bool: ...
    def shutdown(self) -> None: ...
    def __enter__(self) -> LLM: ...
    def __exit__(self, *_: object) -> None: ...


class LLMEngine:
    def __init__(self, config: ResolvedConfig): ...
    config: ResolvedConfig
    use: ...
    tokenizer: ...
    @classmethod
    def from_config(
        cls,
        config: str | Path | Mapping[str, Any] | LayeredConfig | None = None,
        *,
        options: Iterable[str] = (),
        **keywords: Any,
    ) -> Self: ...
    def process_input(self, prompt: Prompt, params: SamplingParams | None = None) -> ProcessedInput: ...
    def default_sampling_params(self) -> SamplingParams: ...
    def add_request(
        self,
        request_id: str,
        prompt: Prompt | ProcessedInput,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
    ) -> None: ...
    def step(self) -> list[RequestOutput]: ...
    def abort_request(self, request_ids: str | Iterable[str]) -> list[RequestOutput]: ...
    def hold(self, request_ids: str | Iterable[str]) -> None: ...
    def resume(self, request_ids: str | Iterable[str]) -> None: ...
    @property
    def is_runnable(self) -> bool: ...
    @property
    def wakeup(self) -> threading.Condition: ...
    def has_unfinished_requests(self) -> bool: ...
    def get_num_unfinished_requests(self) -> int: ...
    @property
    def request_ids(self) -> list[str]: ...
    def token_progress(self, request_ids: Iterable[str]) -> TokenProgress: ...
    @property
    def core(self) -> EngineCore: ...
    def create_sequence(
        self,
        request_id: str,
        processed: ProcessedInput,
        fork_parent: Sequence | None,
    ) -> Sequence: ...
    def reset_prefix_cache(self) -> PrefixCacheReset: ...
    def forget_finished(self) -> None: ...
    def add_telemetry_sink(self, sink: TelemetrySink) -> None: ...
    def sleep(self, level: int = 1) -> int: ...
    def wake_up(self, *, new_weights: bool = False) -> None: ...
    def is_sleeping(self) -> bool: ...
    def determine_num_available_blocks(self) -> tuple[int, int]: ...
    def initialize_cache(self, num_device_blocks: int, num_host_blocks: int = 0) -> None: ...
    def cache_statistics(self) -> KVStatistics: ...
    def speculation_totals(self) -> dict[str, SpeculationTotals]: ...
    def shutdown(self, timeout_s: float = 30.0) -> None: ...
    @property
    def is_closed(self) -> bool: ...
    def __enter__(self) -> LLMEngine: ...
    def __exit__(self, *_: object) -> None: ...

PositionLogprobs = dict[int, Logprob]

@dataclass(slots=True)
class RequestMetrics:
    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_generated_tokens: int = 0
    drafter: str | None = None
    num_draft_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    drafter_error: str | None = None
    @property
    def acceptance_rate(self) -> float | None: ...
    @property
    def mean_accepted_length(self) -> float | None: ...


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    error: str | None = None
    weight_version: int = 0
    @property
    def num_cached_tokens(self) -> int: ...

__version__: str
