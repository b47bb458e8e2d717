from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from dovetail.contracts.executor import RankStatus
from dovetail.contracts.plugin import Plugin, PluginOptions
from dovetail.contracts.router import CacheEvent
from dovetail.contracts.step import StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmDescription:
    name: str
    share: float
    drafter: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentDescription:
    name: str
    arms: tuple[ArmDescription, ...]
    unit: str
    slice_s: float
    traffic: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    experiment: str
    arm: str
    unit_hash: str
    slice: int | None
    num_running: int
    num_others: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    model: str
    max_model_len: int
    block_size: int
    num_blocks: int
    num_host_blocks: int
    prefix_caching: bool
    kv_dtype: str
    drafter: str | None = None
    experiments: tuple[ExperimentDescription, ...] = ()
    max_loras: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    latency: float
    drafter: str | None = None
    adapter: str = ''
    weight_version: int = 0
    assignment: Assignment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    step_id: int
    time: float
    duration: float
    num_running: int
    num_waiting: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_preempted: int
    num_drafted: int
    num_accepted: int
    kv_blocks_used: int
    kv_blocks_total: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    times: StepTimes
    num_draft_rounds: int = 0
    num_decoded: int = 0
    first_tokens: tuple[FirstToken, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarStats:
    form: str
    was_compiled: bool
    wait: float | None
    is_refused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    request_id: str
    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    finish_time: float
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    drafter: str | None = None
    num_draft_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    drafter_error: str | None = None
    speculation: str | None = None
    drafter_is_idle: bool = False
    adapter: str = ''
    weight_version: int = 0
    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    priority: int = 0
    is_salted: bool = False
    has_prompt_logprobs: bool = False
    grammar: GrammarStats | None = None
    error_type: str | None = None
    trace_context: Mapping[str, str] = field(default_factory=dict)
    assignment: Assignment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterTotals:
    num_draft_rounds: int
    num_drafted: int
    num_accepted: int
    accepted_per_position: tuple[int, ...]
    num_errors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkTotals:
    name: str
    seconds: float
    is_on: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    status: RankStatus
    kv_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorTotals:
    is_on: bool
    num_saved_blocks: int
    num_loaded_blocks: int
    num_dropped_blocks: int
    num_failures: int
    num_corrupt: int
    num_timeouts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    num_running: int
    num_waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    weight_version: int
    is_asleep: bool
    drafters: Mapping[str, DrafterTotals] = field(default_factory=dict)
    sinks: tuple[SinkTotals, ...] = ()
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()
    weight_checksum: str = ''
    external_query_tokens: int = 0
    external_hit_tokens: int = 0
    ranks: tuple[RankState, ...] = ()
    connector: ConnectorTotals | None = None


class TelemetrySink(Plugin):
    def __init__(self, options: PluginOptions): ...
    options: PluginOptions
    def on_start(self, engine: EngineDescription) -> None: ...
    def on_step(self, stats: StepStats) -> None: ...
    def on_request(self, stats: RequestStats) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposition:
    content_type: str
    body: bytes


class FollowsCache(TelemetrySink):
    @abstractmethod
    def on_kv_events(self, events: Sequence[CacheEvent]) -> None: ...


class Exposes(TelemetrySink):
    @abstractmethod
    def exposition(self, state: EngineState) -> Exposition: ...
