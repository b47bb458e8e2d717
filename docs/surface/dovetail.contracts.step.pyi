from collections.abc import Mapping
from dataclasses import dataclass, field
from dovetail.contracts.grammar_spec import OutputGrammar
from dovetail.contracts.pooling_params import PooledStates, PoolingParams
from dovetail.contracts.sampling import SamplingParams
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    content_hash: str
    handle: str
    first_token: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEvent:
    kind: Literal['stored', 'removed']
    block_hash: bytes


@dataclass(frozen=True, slots=True)
class NewRequest:
    seq_id: int
    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[list[int], ...]
    sampling: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...] = ()
    drafter: str | None = None
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    adapter: str | None = field(default=None, kw_only=True)
    media: tuple[MediaItem, ...] = field(default=(), kw_only=True)
    pooling: PoolingParams | None = field(default=None, kw_only=True)
    grammar: OutputGrammar | None = field(default=None, kw_only=True)
    trace_context: str | None = field(default=None, kw_only=True)
    prediction: tuple[int, ...] = field(default=(), kw_only=True)
    token_types: tuple[int, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True, slots=True)
class AdapterPlacement:
    slot: int
    name: str
    path: str
    digest: str


@dataclass(frozen=True, slots=True)
class DraftTokens:
    token_ids: list[int]
    parents: list[int] | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    step_id: int
    seq_ids: list[int]
    num_tokens: list[int]
    num_drafts: list[int] | None = None
    new_requests: list[NewRequest] = field(default_factory=list)
    new_blocks: list[tuple[int, int, int, list[int]]] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    adapters: tuple[AdapterPlacement, ...] = ()
    sampled: list[tuple[int, list[int]]] = field(default_factory=list, kw_only=True)
    draft_tokens: list[tuple[int, DraftTokens]] = field(default_factory=list, kw_only=True)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]
    surviving_mass: float | None = None


@dataclass(frozen=True, slots=True)
class DraftCounts:
    drafted: int
    accepted: int
    drafter: str
    depth: int = 0
    from_prediction: bool = False


@dataclass(frozen=True, slots=True)
class StepTimes:
    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    draft: float = 0.0


@dataclass(frozen=True, slots=True)
class StepResult:
    step_id: int
    token_ids: list[int]
    counts: list[int] | None = None
    logprobs: Mapping[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)
    num_next_drafts: Mapping[int, int] = field(default_factory=dict)
    draft_counts: Mapping[int, DraftCounts] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
    drafter_errors: Mapping[int, str] = field(default_factory=dict)
    idle_drafters: frozenset[str] = frozenset()
    times: StepTimes = StepTimes()
    weight_version: int = field(default=0, kw_only=True)
    kv_events: tuple[KVEvent, ...] = field(default=(), kw_only=True)
    pooled: Mapping[int, PooledStates] = field(default_factory=dict, kw_only=True)
    next_drafts: Mapping[int, DraftTokens] = field(default_factory=dict, kw_only=True)
