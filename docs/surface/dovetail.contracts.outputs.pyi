from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from dovetail.contracts.lora import LoRARequest
from dovetail.contracts.pooling_params import PooledStates
from typing import Any


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float
    rank: int
    decoded_token: str | None = None
    surviving_mass: float | None = None

Span = tuple[int, int]
PositionLogprobs = dict[int, Logprob]

@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    accepted_spans: Sequence[Span] = ()
    @property
    def finished(self) -> bool: ...
    def defer_tokens(
        self,
        tokens: list[int],
        start: int,
        stop: int,
        positions: list[PositionLogprobs] | None,
        spans: Sequence[Span],
    ) -> None: ...
    def __getattr__(self, name: str) -> Any: ...


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
    num_drafted_from_prediction: int = 0
    num_accepted_from_prediction: int = 0
    @property
    def acceptance_rate(self) -> float | None: ...
    @property
    def mean_accepted_length(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class TokenProgress:
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(slots=True)
class SpeculationTotals:
    num_draft_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    num_drafter_errors: int = 0


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
    is_delta: bool = False
    lora_request: LoRARequest | None = None
    pooled: PooledStates | None = None
    weight_checksum: str = ''
    kv_transfer_params: Mapping[str, Any] | None = None
    @property
    def num_cached_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    tokens: list[int]
    cum_logprob: float
    score: float
    text: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    sequences: list[BeamSearchSequence]
