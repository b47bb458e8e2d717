import threading
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from dovetail.config.layers import LayeredConfig
from dovetail.config.resolved import ResolvedConfig
from dovetail.config.schema import EngineConfig
from dovetail.contracts.engine_client import EngineFacts, RequestPlan, RequestReports
from dovetail.contracts.lora import LoRARequest, LoadedLoRA
from dovetail.contracts.outputs import BeamSearchOutput, CompletionOutput, PositionLogprobs, RequestMetrics, RequestOutput, SpeculationTotals, TokenProgress
from dovetail.contracts.pooling_params import PoolingParams
from dovetail.contracts.prompts import ChatPrompt, Prompt
from dovetail.contracts.sampling import BeamSearchParams, SamplingParams
from dovetail.contracts.structured_outputs import StructuredOutputs
from dovetail.contracts.telemetry import Exposition, TelemetrySink
from dovetail.engine.client_text import ClientText
from dovetail.engine.core import EngineCore
from dovetail.engine.exclusive_use import ExclusiveUse
from dovetail.engine.input_processor import ProcessedInput
from dovetail.engine.kv.manager import KVStatistics
from dovetail.engine.kv.pool import PrefixCacheReset
from dovetail.engine.llm import Message
from dovetail.engine.output_stream import OutputReader
from dovetail.engine.pooling.outputs import Result
from dovetail.engine.sequence import Sequence
from dovetail.engine.tokenization.tokenizer import Tokenizer
from pathlib import Path
from typing import Any, ClassVar, Generic, Self

__all__ = [
    "AsyncLLMEngine",
    "BeamSearchParams",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "EngineProcess",
    "LLM",
    "LLMEngine",
    "LoRARequest",
    "PoolingParams",
    "PoolingRequestOutput",
    "PositionLogprobs",
    "RemoteEngine",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputs",
    "__version__",
]

class AsyncLLMEngine:
    def __init__(self, engine: LLMEngine, *, kept_requests: int = 1000): ...
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
    def facts(self) -> EngineFacts: ...
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
        trace_headers: Mapping[str, str] | None = None,
        user: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]: ...
    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[PoolingRequestOutput]: ...
    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        user: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> OutputReader: ...
    async def plan_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
    ) -> RequestPlan: ...
    async def explain_request(self, request_id: str) -> RequestReports: ...
    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
    ) -> str: ...
    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        **options: Any,
    ) -> ChatPrompt: ...
    def token_texts(self, token_ids: Iterable[int]) -> list[str]: ...
    async def abort(self, request_id: str) -> None: ...
    async def hold(self, request_ids: str | Iterable[str]) -> None: ...
    async def resume(self, request_ids: str | Iterable[str]) -> None: ...
    async def add_lora(self, request: LoRARequest) -> LoadedLoRA: ...
    async def remove_lora(self, adapter: str | int) -> None: ...
    async def list_loras(self) -> list[LoadedLoRA]: ...
    async def pin_lora(self, adapter: str | int) -> None: ...
    async def reset_prefix_cache(self) -> PrefixCacheReset: ...
    async def sleep(self, level: int = 1) -> int: ...
    async def wake_up(self, *, new_weights: bool = False) -> None: ...
    async def is_sleeping(self) -> bool: ...
    async def cache_statistics(self) -> KVStatistics: ...
    async def metrics(self) -> Exposition: ...
    def shutdown(self, timeout_s: float = 30.0) -> None: ...
    def __enter__(self) -> AsyncLLMEngine: ...
    def __exit__(self, *_: object) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationRequestOutput(Generic[Result]):
    @staticmethod
    def from_base(base: PoolingRequestOutput) -> ClassificationRequestOutput: ...
    request_id: str
    outputs: Result
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    weight_version: int = 0
    lora_request: LoRARequest | None = None
    metrics: RequestMetrics | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequestOutput(Generic[Result]):
    @staticmethod
    def from_base(base: PoolingRequestOutput) -> EmbeddingRequestOutput: ...
    request_id: str
    outputs: Result
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    weight_version: int = 0
    lora_request: LoRARequest | None = None
    metrics: RequestMetrics | None = None


class EngineProcess:
    def __init__(self, config: LayeredConfig, directory: str | Path | None = None): ...
    directory: ...
    address: ...
    @property
    def pid(self) -> int: ...
    @property
    def is_alive(self) -> bool: ...
    def wait(self) -> None: ...
    def join(self) -> int: ...
    def ask_to_end(self) -> None: ...
    def kill(self) -> None: ...
    def stop(self, timeout_s: float = 30.0) -> None: ...
    def __enter__(self) -> EngineProcess: ...
    def __exit__(self, *_: object) -> None: ...


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
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
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
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]: ...
    def render_chat(self, messages: Sequence[Message], **template_options: Any) -> Prompt: ...
    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[BeamSearchOutput]: ...
    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput]: ...
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[EmbeddingRequestOutput]: ...
    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[ClassificationRequestOutput]: ...
    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[PoolingRequestOutput]: ...
    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]: ...
    def get_tokenizer(self) -> Tokenizer | None: ...
    def get_default_sampling_params(self) -> SamplingParams: ...
    def reset_prefix_cache(self) -> PrefixCacheReset: ...
    def add_lora(self, request: LoRARequest) -> LoadedLoRA: ...
    def remove_lora(self, adapter: str | int) -> None: ...
    def list_loras(self) -> list[LoadedLoRA]: ...
    def pin_lora(self, adapter: str | int) -> None: ...
    def sleep(self, level: int = 1) -> int: ...
    def wake_up(self, *, new_weights: bool = False) -> None: ...
    def is_sleeping(self) -> bool: ...
    def shutdown(self) -> None: ...
    def __enter__(self) -> LLM: ...
    def __exit__(self, *_: object) -> None: ...


class LLMEngine:
    def __init__(self, config: ResolvedConfig): ...
    config: ResolvedConfig
    tokens: ...
    tokenizer: Tokenizer | None
    @classmethod
    def from_config(
        cls,
        config: str | Path | Mapping[str, Any] | LayeredConfig | None = None,
        *,
        options: Iterable[str] = (),
        **keywords: Any,
    ) -> Self: ...
    @property
    def facts(self) -> EngineFacts: ...
    @property
    def use(self) -> ExclusiveUse: ...
    def process_input(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
    ) -> ProcessedInput: ...
    def create_client_text(self) -> ClientText: ...
    def default_sampling_params(self) -> SamplingParams: ...
    def add_request(
        self,
        request_id: str,
        prompt: Prompt | ProcessedInput,
        params: SamplingParams | PoolingParams | None = None,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        user: str | None = None,
        lora_request: LoRARequest | None = None,
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
    def start_lora(self, request: LoRARequest) -> Future[LoadedLoRA]: ...
    def add_lora(self, request: LoRARequest) -> LoadedLoRA: ...
    def remove_lora(self, adapter: str | int) -> None: ...
    def list_loras(self) -> list[LoadedLoRA]: ...
    def pin_lora(self, adapter: str | int) -> None: ...
    def forget_finished(self) -> None: ...
    def add_telemetry_sink(self, sink: TelemetrySink) -> None: ...
    def sleep(self, level: int = 1) -> int: ...
    def wake_up(self, *, new_weights: bool = False) -> None: ...
    def is_sleeping(self) -> bool: ...
    def determine_num_available_blocks(self) -> tuple[int, int]: ...
    def initialize_cache(self, num_device_blocks: int, num_host_blocks: int = 0) -> None: ...
    def cache_statistics(self) -> KVStatistics: ...
    def speculation_totals(self) -> dict[str, SpeculationTotals]: ...
    def metrics(self) -> Exposition: ...
    def keep_ended(self, most: int) -> None: ...
    def explain_request(self, request_id: str) -> RequestReports: ...
    def shutdown(self, timeout_s: float = 30.0) -> None: ...
    @property
    def is_closed(self) -> bool: ...
    def __enter__(self) -> LLMEngine: ...
    def __exit__(self, *_: object) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequestOutput(Generic[Result]):
    error: str | None = None
    prompt: str | None = None
    @staticmethod
    def from_request(output: RequestOutput) -> PoolingRequestOutput: ...
    request_id: str
    outputs: Result
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    weight_version: int = 0
    lora_request: LoRARequest | None = None
    metrics: RequestMetrics | None = None


class RemoteEngine:
    def __init__(self, address: str): ...
    @classmethod
    async def connect(cls, address: str, timeout_s: float | None = None) -> Self: ...
    @property
    def facts(self) -> EngineFacts: ...
    @property
    def is_running(self) -> bool: ...
    async def wait_until_running(self) -> None: ...
    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        user: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> OutputReader: ...
    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        user: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]: ...
    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[PoolingRequestOutput]: ...
    async def abort(self, request_id: str) -> None: ...
    async def plan_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
    ) -> RequestPlan: ...
    async def explain_request(self, request_id: str) -> RequestReports: ...
    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
    ) -> str: ...
    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        **options: Any,
    ) -> ChatPrompt: ...
    def token_texts(self, token_ids: Iterable[int]) -> list[str]: ...
    async def metrics(self) -> Exposition: ...
    async def add_lora(self, request: LoRARequest) -> LoadedLoRA: ...
    async def remove_lora(self, adapter: str | int) -> None: ...
    async def list_loras(self) -> list[LoadedLoRA]: ...
    async def pin_lora(self, adapter: str | int) -> None: ...
    async def check_health(self) -> None: ...
    async def call(self, name: str, **arguments: Any) -> Any: ...
    async def close(self) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_: object) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRequestOutput(Generic[Result]):
    request_id: str
    outputs: Result
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    weight_version: int = 0
    lora_request: LoRARequest | None = None
    metrics: RequestMetrics | None = None

__version__: str
