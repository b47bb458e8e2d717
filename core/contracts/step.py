"""What crosses between the engine and its workers: one plan per step, one result per step.

Only differences travel. A request is sent whole when a worker first computes it; later steps name it by its integer
`key` and add the blocks that are new. Tokens that a worker sampled stay there as well, so a decode step sends
no token ids. Everything here is plain Python and pickles small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dovetail.contracts.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that a worker does not hold, or that comes back after a preemption or from swap."""

    key: int
    """Engine-wide number of the sequence; never used again for another."""
    request_id: str
    token_ids: list[int]
    """All known tokens: the prompt and, after a preemption, the output so far."""
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[list[int], ...]
    """Per KV group, the blocks from position 0 on; 0 stands for a block that a sliding window has freed."""
    sampling: SamplingParams
    seed: int
    """Root of the request's random streams; drawn by the engine where the request gives none."""
    eos_token_ids: tuple[int, ...] = ()
    drafter: str | None = None
    """Which configured drafter guesses for this request; None: none."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences of `SamplingParams.bad_words`: the last token of each cannot follow the others."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step for all workers. The lists `keys`, `num_tokens` and `num_drafts` run in parallel, one entry per
    scheduled request, in batch order."""

    step_id: int
    keys: list[int]
    num_tokens: list[int]
    """Tokens that each request computes in this step, its drafts included."""
    num_drafts: list[int] | None = None
    """How many of them are drafts, the last ones; None: no request has any."""
    new_requests: list[NewRequest] = field(default_factory=list)
    new_blocks: list[tuple[int, int, int, list[int]]] = field(default_factory=list)
    """(key, group_id, index, block ids): entries of a request's block table from `index` on are these."""
    finished: list[int] = field(default_factory=list)
    """Keys that the worker may forget, before it looks at anything else in the plan."""
    preempted: list[int] = field(default_factory=list)
    """Keys that leave the batch, likewise, and will come back as new requests."""
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    """(device block, host block): copied first of all."""
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    """(host block, device block): copied next."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(from, to) device blocks: copy-on-write, last before the forward pass."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Raw log probabilities at one position."""

    token_id: int
    """The token that stands there."""
    logprob: float
    rank: int
    """1 for the most likely token of the vocabulary."""
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """What became of one request's drafts in one step."""

    drafted: int
    accepted: int
    drafter: str
    depth: int = 0
    """Guesses that could have stood together: all of a chain, the longest path of a tree."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds that a worker spent in the parts of one step."""

    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    draft: float = 0.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step brought. Dictionaries are keyed by the request's place in the plan and usually empty."""

    step_id: int
    token_ids: list[int]
    """Sampled tokens of all requests, one after the other in plan order."""
    counts: list[int] | None = None
    """Tokens that each request got: 0 while its prompt is incomplete, 1, or up to drafts + 1. None: one each."""
    logprobs: Mapping[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)
    """For the prompt tokens that this step's query tokens predict: position of the first of them, and its entries."""
    num_next_drafts: Mapping[int, int] = field(default_factory=dict)
    """Guesses that wait in the worker for the next step."""
    draft_counts: Mapping[int, DraftCounts] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
    """Requests that cannot go on (a logits processor raised, say), with the message for their user."""
    drafter_errors: Mapping[int, str] = field(default_factory=dict)
    """Requests whose drafter raised in this step; they go on without speculation."""
    idle_drafters: frozenset[str] = frozenset()
    """Drafters with layers of their own that have only cost for long, as far as the worker can tell: new requests may
    go without them."""
    times: StepTimes = StepTimes()
