from dataclasses import dataclass
from dovetail.contracts.plugin import Plugin, PluginOptions
from dovetail.contracts.step import StepTimes


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class RequestStats:
    request_id: str
    arrival_time: float
    first_scheduled_time: float
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


class TelemetrySink(Plugin):
    def __init__(self, options: PluginOptions): ...
    options: PluginOptions
    def on_step(self, stats: StepStats) -> None: ...
    def on_request(self, stats: RequestStats) -> None: ...
    def close(self) -> None: ...
