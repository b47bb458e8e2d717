"""What the engine and its workers exchange: one plan and one result per step.

Only differences travel. A request is sent whole when a worker first computes it; later steps name it by its integer
`seq_id` and add the blocks that are new. Tokens that a worker sampled stay there as well, so a decode step sends
no token ids. Only pipeline stages but the last, which sample nothing, get them with the next plan (`StepPlan.sampled`).
Everything here is plain Python and pickles small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dovetail.contracts.grammar_spec import OutputGrammar
from dovetail.contracts.pooling_params import PooledStates, PoolingParams
from dovetail.contracts.reserved import refuse_reserved
from dovetail.contracts.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    """An image, a sound or a video of a prompt, by name: the record never carries its data."""

    content_hash: str
    """SHA-256 of the item's bytes, in hexadecimal; part of the hash of KV blocks whose tokens are its placeholders."""
    handle: str
    """Name of the item's processed tensors, by which workers read them."""
    first_token: int
    """Index of the item's first placeholder among the request's tokens."""
    num_tokens: int
    """Number of the item's placeholders, which are consecutive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEvent:
    """A KV block became available to other processes, or no longer is."""

    kind: Literal["stored", "removed"]
    block_hash: bytes
    """Hash of the block's content, as prefix caching computes it."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that is new to the workers, or comes back after a preemption or from swap.

    Raises `PluginError` where a reserved field is used.
    """

    seq_id: int
    """Engine-wide number of the sequence; the engine gives it to no other."""
    request_id: str
    token_ids: list[int]
    """All known tokens: the prompt and, after a preemption, the output so far."""
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[list[int], ...]
    """Per KV group, the blocks from position 0 on; 0 for a block that a sliding window has freed."""
    sampling: SamplingParams
    seed: int
    """Root of the request's random streams; drawn by the engine where the request gives none."""
    eos_token_ids: tuple[int, ...] = ()
    drafter: str | None = None
    """Label of the drafter that guesses for this request; None: no drafter."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences of `SamplingParams.bad_words`: the last token of each cannot follow the others."""
    adapter: str | None = field(default=None, kw_only=True)
    """Digest of the low-rank adapter that is added to the weights for this request; None: none is. Workers have it in
    the slot where an `AdapterPlacement` put it last."""
    media: tuple[MediaItem, ...] = field(default=(), kw_only=True)
    """Reserved: media items of the placeholders among the tokens, in ascending order of `first_token`."""
    pooling: PoolingParams | None = field(default=None, kw_only=True)
    """What is made of the prompt's hidden states, with its task, in place of sampling: the worker draws no token, and
    returns `StepResult.pooled` in the step that computes the last token. None: tokens are sampled."""
    grammar: OutputGrammar | None = field(default=None, kw_only=True)
    """Which tokens may be sampled; the rank that answers compiles it."""
    trace_context: str | None = field(default=None, kw_only=True)
    """Reserved: the `traceparent` of W3C Trace Context, under which workers report their spans."""
    prediction: tuple[int, ...] = field(default=(), kw_only=True)
    """Token ids of `SamplingParams.prediction`."""
    token_types: tuple[int, ...] = field(default=(), kw_only=True)
    """The type of each token (`ModelInputs.token_types`); empty: all are 0."""

    def __post_init__(self) -> None:
        refuse_reserved(
            "NewRequest",
            {
                "media": (self.media, "workers read no media yet"),
                "trace_context": (self.trace_context, "workers report no spans yet"),
            },
        )


@dataclass(frozen=True, slots=True)
class AdapterPlacement:
    """An adapter takes a slot next to the weights, in place of the one that was there."""

    slot: int
    name: str
    """For messages."""
    path: str
    """Folder with its files, as every worker sees it."""
    digest: str
    """Of the content that was checked: a worker that finds another raises `ModelError`."""


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """The draft tokens of one request. Node i is `token_ids[i]`; parents come before children."""

    token_ids: list[int]
    parents: list[int] | None = None
    """Index of each node's parent, -1 for children of the last known token. None: a chain."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step for all workers. The lists `seq_ids`, `num_tokens` and `num_drafts` run in parallel, one entry per
    scheduled request, in batch order."""

    step_id: int
    seq_ids: list[int]
    num_tokens: list[int]
    """Tokens that each request computes in this step, its drafts included."""
    num_drafts: list[int] | None = None
    """How many of them, the last ones, are draft tokens; None: no request has any."""
    new_requests: list[NewRequest] = field(default_factory=list)
    new_blocks: list[tuple[int, int, int, list[int]]] = field(default_factory=list)
    """(seq_id, group_id, index, block ids): entries of a request's block table from `index` on are these."""
    finished: list[int] = field(default_factory=list)
    """seq_ids that the worker may forget, before it looks at anything else in the plan."""
    preempted: list[int] = field(default_factory=list)
    """seq_ids that leave the batch, likewise, and will come back as new requests."""
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    """(device block, host block): the worker copies these first."""
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    """(host block, device block): the worker copies these second."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(from, to) device blocks for copy-on-write: the worker copies these last, before the forward pass."""
    adapters: tuple[AdapterPlacement, ...] = ()
    """Adapters that change slots before the forward pass, in this order. Requests that are in the batch may be among
    those whose adapter moves."""
    sampled: list[tuple[int, list[int]]] = field(default_factory=list, kw_only=True)
    """(seq_id, token ids): what requests of the batch got since they were last in a plan, in the order of their output.
    Stages but the last apply it after `finished` and `preempted`, before anything that reads tokens; the last has these
    tokens already. A request among `new_requests` brings its tokens itself. Empty where there is one stage."""
    draft_tokens: list[tuple[int, DraftTokens]] = field(default_factory=list, kw_only=True)
    """(seq_id, drafts): the tokens that `num_drafts` counts, for stages but the last, in the order in which they are
    computed behind the last known token. The last stage has them already. Empty where there is one stage."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position, of the distribution that the request's `logprobs_mode` names."""

    token_id: int
    logprob: float
    """Log probability of the token at the position."""
    rank: int
    """1 for the most likely token of the vocabulary."""
    top_ids: list[int]
    top_logprobs: list[float]
    surviving_mass: float | None = None
    """Of processed log probabilities, as in `Logprob`; None: they are raw."""


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """How many draft tokens of one request were verified and accepted in one step."""

    drafted: int
    accepted: int
    drafter: str
    depth: int = 0
    """Draft tokens that could have been accepted together: the length of a chain, or of the longest path of a tree."""
    from_prediction: bool = False
    """Whether they were read from the request's prediction."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds that a worker spent in the parts of one step."""

    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    draft: float = 0.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step. Dictionaries have the request's batch index in the plan as key and are usually empty.

    Raises `PluginError` where a reserved field is used.
    """

    step_id: int
    token_ids: list[int]
    """Sampled tokens of all requests, concatenated in plan order."""
    counts: list[int] | None = None
    """Number of sampled tokens of each request: 0 while its prompt is incomplete, and for those that are pooled, else 1
    to num_drafts + 1. None: 1 each."""
    logprobs: Mapping[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)
    """For the prompt tokens that this step's query tokens predict: position of the first of them, and its entries."""
    num_next_drafts: Mapping[int, int] = field(default_factory=dict)
    """Number of draft tokens that wait in the worker for the next step."""
    draft_counts: Mapping[int, DraftCounts] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
    """Requests that cannot go on (a logits processor raised, say), with the message for their user."""
    drafter_errors: Mapping[int, str] = field(default_factory=dict)
    """Requests whose drafter raised in this step; they go on without speculation."""
    idle_drafters: frozenset[str] = frozenset()
    """Drafters with layers of their own that have only cost time for long: new requests may go without them."""
    times: StepTimes = StepTimes()
    weight_version: int = field(default=0, kw_only=True)
    """Reserved: version of the weights that computed the step: how often weights were loaded before it."""
    kv_events: tuple[KVEvent, ...] = field(default=(), kw_only=True)
    """Reserved: blocks that a connector of the worker stored elsewhere, or that were removed there."""
    pooled: Mapping[int, PooledStates] = field(default_factory=dict, kw_only=True)
    """Results of requests with `NewRequest.pooling` whose last token the step computed."""
    next_drafts: Mapping[int, DraftTokens] = field(default_factory=dict, kw_only=True)
    """The tokens that `num_next_drafts` counts; the engine passes them on (`StepPlan.draft_tokens`).
    Empty where there is one stage."""

    def __post_init__(self) -> None:
        if self.weight_version or self.kv_events:  # made in every step
            refuse_reserved(
                "StepResult",
                {
                    "weight_version": (
                        self.weight_version,
                        "the engine counts the versions, between requests",
                    ),
                    "kv_events": (self.kv_events, "the engine publishes no KV events yet"),
                },
            )
