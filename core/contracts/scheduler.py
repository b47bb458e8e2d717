"""Scheduler: which requests run in the next step, with how many tokens, and who gives way.

A scheduler is pure Python over plain state and imports no torch. There is no prefill or decode phase: a request
has `num_tokens` known tokens (prompt and output) and `num_draft_tokens` guesses, of which `num_computed_tokens`
have their keys and values in memory; a step computes some of the difference.

The engine calls, in a loop::

    scheduler.add(request)          a request arrives
    scheduler.schedule(memory)      -> Schedule; blocks are taken and given back through `memory`
    (the step runs; the engine commits tokens and advances num_tokens, num_computed_tokens, num_draft_tokens)
    scheduler.remove(request)       the request finished or was aborted; its blocks are freed by the engine

Overlap of scheduling with execution is the engine's business; a scheduler sees only these calls. Where steps overlap,
the counts are those that the step under way will have led to.

What a scheduler must do, whatever its policy:

- It keeps to `SchedulerLimits` in every step.
- It makes progress: each step computes something while there are requests, and once no more come, every request
  finishes after finitely many steps.
- It uses what the config gives. Where tokens and memory suffice, `max_num_seqs` requests come to run at a time, and a
  request that has the step to itself computes all its wanted tokens, drafts included: otherwise speculation that the
  config asks for would be silently off.

What is the policy's own: the order of requests (the last to arrive may be first), who gives way, when those that gave
way come back (preempted and swapped requests may stand behind all that wait), and how tokens are shared out among
requests that compete for them, drafts among them. A policy may let some requests wait as long as others keep coming,
as priorities do; that is not starvation which the contract forbids, as they finish once the others have.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Protocol

from dovetail.contracts.plugin import Plugin, PluginOptions


class RequestStatus(Enum):
    """Where a request stands. Schedulers move requests between the first four; the engine sets FINISHED."""

    WAITING = "waiting"
    """Holds no blocks."""
    RUNNING = "running"
    """Holds blocks on the device for all its computed tokens."""
    PREEMPTED = "preempted"
    """Gave its blocks back; its tokens are known but nothing is computed."""
    SWAPPED = "swapped"
    """Its blocks are in host memory."""
    FINISHED = "finished"


class RequestState:
    """One sequence, as schedulers see it. The engine owns it and writes the counts; schedulers write `status`."""

    __slots__ = (
        "arrival_time",
        "extra",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_draft_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "priority",
        "request_id",
        "status",
    )

    def __init__(self, request_id: str, num_prompt_tokens: int, priority: int = 0, arrival_time: float = 0.0):
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = num_prompt_tokens
        """Prompt tokens and committed output tokens."""
        self.num_computed_tokens = 0
        """Leading tokens whose keys and values are in memory; the first wanted token stands here."""
        self.num_draft_tokens = 0
        """Guesses that wait for verification; they follow the last known token."""
        self.num_cached_tokens = 0
        """Prompt tokens that were found in the prefix cache when the request was first admitted."""
        self.num_preemptions = 0
        self.priority = priority
        """Lower runs first, as in vLLM."""
        self.arrival_time = arrival_time
        """Seconds, time.monotonic()."""
        self.status = RequestStatus.WAITING
        self.extra: dict[str, Any] = {}
        """Free for the scheduler's own notes on this request."""

    @property
    def num_wanted_tokens(self) -> int:
        """Tokens that a step may compute: what is known or guessed and not computed yet."""
        return self.num_tokens + self.num_draft_tokens - self.num_computed_tokens


class KVMemory(Protocol):
    """The KV blocks, as schedulers may use them. Every method leaves the memory consistent.

    Methods that answer bool change nothing when they answer False.
    """

    block_size: int

    @property
    def num_blocks(self) -> int:
        """Blocks of the device pool."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, those with cached content included."""

    def awaits_prefix(self, request: Any) -> bool:
        """Whether a request without blocks would compute what another request is given to compute: the block behind
        its cached prefix is part of this schedule, or of the step under way. Let in one step later it finds that block
        in the cache.
        """

    def attach_prefix(self, request: Any) -> int:
        """Finds the longest cached prefix of a request without blocks, takes those blocks for it, and returns
        their tokens, a number below `request.num_tokens` so that there is something left to compute.

        The engine's `num_computed_tokens` is set to it. Call before the first `allocate` of a request; undo with
        `release` where the request is not admitted after all.
        """

    def allocate(self, request: Any, num_new_tokens: int, reserve: int = 0) -> bool:
        """Takes the blocks that `request` needs to hold its computed tokens and `num_new_tokens` more, and those that
        its drafter writes to before its guesses are verified, where that keeps keys and values of its own.

        With `reserve`, answers False unless that many blocks stay free besides.
        """

    def release(self, request: Any) -> None:
        """Gives all of the request's blocks back; sets num_computed_tokens and num_draft_tokens to 0."""

    def swap_out(self, request: Any) -> bool:
        """Moves the request's blocks to host memory and frees them on the device. False: no room there, no swap
        space is configured, or the blocks were filled in by nothing yet."""

    def swap_in(self, request: Any) -> bool:
        """Brings swapped blocks back. False: not enough free blocks on the device."""


@dataclass(frozen=True)
class SchedulerLimits:
    """What the config allows in one step."""

    max_num_batched_tokens: int
    """Tokens computed in one step, drafts included."""
    max_num_seqs: int
    """Requests that hold a place in the batch."""
    max_model_len: int
    enable_chunked_prefill: bool = True
    """Off: a prompt is computed in one step or waits, unless no step could ever take it whole: known tokens beyond
    max_num_batched_tokens (a long output that is recomputed, say) are computed in parts even then."""
    max_num_partial_prefills: int = 1
    """Prompts that may be computed in part in one step."""
    max_long_partial_prefills: int = 1
    """Of these, how many may be longer than long_prefill_token_threshold."""
    long_prefill_token_threshold: int = 0
    """Prompts with more tokens left than this are long, and get at most this many tokens a step. 0: none is."""


@dataclass(slots=True)
class Schedule:
    """One step's decision. `requests[i]` computes `num_tokens[i]` tokens: at least 1, at most its wanted
    tokens, and its blocks are allocated. No request stands twice."""

    requests: list[Any] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    preempted: list[Any] = field(default_factory=list)
    """All requests that gave way in this step, for telemetry alone: what the workers must forget, the engine learns
    from the memory itself."""


class Scheduler(Plugin):
    """Owns the order of requests; the engine owns the requests, their tokens and their blocks."""

    uses_priority: ClassVar[bool] = False
    """Whether `RequestState.priority` decides anything; where it does not, the engine refuses requests that set it."""

    def __init__(self, options: PluginOptions, limits: SchedulerLimits):
        self.options = options
        self.limits = limits

    @abstractmethod
    def add(self, request: RequestState) -> None:
        """Takes in a new request (status WAITING)."""

    @abstractmethod
    def remove(self, request: RequestState) -> None:
        """Forgets a request, in whatever status it was scheduled last. Its blocks are the engine's to free."""

    @abstractmethod
    def schedule(self, memory: KVMemory) -> Schedule:
        """Decides one step.

        Respects the limits; sets statuses; must schedule something whenever it has requests, since the engine
        makes sure, before `add`, that each request fits in empty memory. Raises nothing for lack of memory.
        """

    @property
    @abstractmethod
    def num_running(self) -> int:
        """Requests with status RUNNING."""

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Requests that were added and not removed and are not running."""
