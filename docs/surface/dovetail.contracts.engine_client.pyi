from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from dovetail.contracts.lora import LoRARequest, LoadedLoRA
from dovetail.contracts.outputs import RequestOutput
from dovetail.contracts.pausing import PauseMode
from dovetail.contracts.pooling_params import PoolingParams
from dovetail.contracts.prompts import ChatPrompt, Prompt
from dovetail.contracts.regions import RegionStatus
from dovetail.contracts.sampling import RAW_LOGPROBS, SamplingParams
from dovetail.contracts.telemetry import Exposition, RequestStats
from dovetail.contracts.weight_transport import WeightsReport
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class DialectFacts:
    name: str
    reference: str
    options: Mapping[str, Any] = field(default_factory=dict)
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    chat_template: str = ''


@dataclass(frozen=True, kw_only=True)
class GrammarFacts:
    name: str = ''
    forms: tuple[str, ...] = ()
    refusal: str = ''


@dataclass(frozen=True, kw_only=True)
class RuleFacts:
    sampling: bool
    trees: bool


@dataclass(frozen=True, kw_only=True)
class PoolingFacts:
    poolers: Mapping[str, str] = field(default_factory=dict)
    refusals: Mapping[str, str] = field(default_factory=dict)
    skips_prefix: frozenset[str] = frozenset()
    hidden_size: int = 0
    num_labels: int = 0
    labels: tuple[str, ...] = ()
    normalizes: bool = True


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_logprobs: int
    logprobs_mode: str = RAW_LOGPROBS
    max_completions: int
    scheduler: str
    has_priorities: bool
    processors: tuple[str, ...] = ()
    drafters: tuple[str, ...] = ()
    default_drafter: str | None = None
    experiments: tuple[str, ...] = ()
    acceptance: str | None = None
    accepts_sampling: bool = True
    rules: Mapping[str, RuleFacts] = field(default_factory=dict)
    tree_drafters: frozenset[str] = frozenset()
    prediction_drafters: frozenset[str] = frozenset()
    drafts_without_logprobs: bool = False
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    grammar: GrammarFacts = GrammarFacts(refusal='this engine has no grammar plugin')
    block_size: int = 0
    prefix_caching: bool = False
    architecture: str = ''
    max_loras: int = 0
    dialect: DialectFacts | None = None
    pooling: PoolingFacts = PoolingFacts()
    num_token_types: int = 0
    why_not_generate: str = ''
    num_workers: int = 1
    kv_transfer_params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RequestPlan:
    num_prompt_tokens: int
    max_tokens: int
    drafter: str | None
    grammar_form: str | None


@dataclass(frozen=True, kw_only=True)
class RequestReport:
    state: str
    stats: RequestStats


@dataclass(frozen=True, kw_only=True)
class RequestReports:
    requests: tuple[RequestReport, ...]
    num_kept: int


class RequestStream(Protocol):
    request_id: str
    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...
    def close(self) -> None: ...


class EngineClient(Protocol):
    @property
    def facts(self) -> EngineFacts: ...
    @property
    def is_running(self) -> bool: ...
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
    ) -> RequestStream: ...
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
    async def pair_prompt(
        self,
        first: Prompt,
        second: Prompt,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> Prompt: ...
    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        **options: Any,
    ) -> ChatPrompt: ...
    def token_texts(self, token_ids: Iterable[int]) -> list[str]: ...
    async def add_lora(self, request: LoRARequest) -> LoadedLoRA: ...
    async def remove_lora(self, adapter: str | int) -> None: ...
    async def list_loras(self) -> list[LoadedLoRA]: ...
    async def pin_lora(self, adapter: str | int) -> None: ...
    async def pause(self, mode: PauseMode = 'abort') -> None: ...
    async def resume(self) -> None: ...
    async def is_paused(self) -> bool: ...
    async def sleep(self, level: int = 1, tags: Collection[str] | None = None) -> int: ...
    async def wake_up(
        self,
        tags: Collection[str] | None = None,
        *,
        new_weights: bool = False,
        for_update: bool = False,
    ) -> None: ...
    async def regions(self) -> tuple[RegionStatus, ...]: ...
    async def is_sleeping(self) -> bool: ...
    async def init_weight_transfer_engine(self, init_info: Mapping[str, Any] | None = None) -> None: ...
    async def start_weight_update(
        self,
        is_checkpoint_format: bool = True,
        *,
        weight_version: int | None = None,
        partial: bool = False,
    ) -> int: ...
    async def update_weights(
        self,
        update_info: Mapping[str, Any],
        *,
        drafter: str | None = None,
    ) -> None: ...
    async def finish_weight_update(self) -> WeightsReport: ...
    async def abort_weight_update(self) -> None: ...
    async def weights(self) -> WeightsReport: ...
    async def metrics(self) -> Exposition: ...
    async def check_health(self) -> None: ...
