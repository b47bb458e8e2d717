"""Scheduler: which requests run in the next step, with how many tokens, and which are preempted.

A scheduler is pure Python over plain state and imports no torch. There is no prefill or decode phase: a request
has `num_tokens` known tokens (prompt and output) and `num_draft_tokens` guesses, of which `num_computed_tokens`
have their keys and values in memory; a step computes some of the difference.

The engine calls, in a loop::

    scheduler.add(request)          a request arrives
    scheduler.schedule(memory)      -> Schedule; blocks are taken and given back through `memory`
    (the step runs; the engine commits tokens and advances num_tokens, num_computed_tokens, num_draft_tokens)
    scheduler.remove(request)       the request finished or was aborted; its blocks are freed by the engine

Steps may overlap: `schedule` may be called while several steps are in flight (handed to the workers, tokens not known
yet). The counts then include what the steps in flight compute.

Every request in a schedule was granted its tokens by `KVMemory.grant` during that call of `schedule`::

    granted = memory.grant(request, num_tokens)
    if granted:
        schedule.requests.append(request)
        schedule.num_tokens.append(granted)     # what was granted, not what was asked
    elif memory.num_missing_blocks(request, num_tokens):
        ...                                     # blocks are short: preempt another request and ask again, or wait
    # else: the host grants none in this step, and preempting others does not help

What a scheduler must do, whatever its policy:

- It keeps to `SchedulerLimits` in every step.
- It uses what it was granted, which may be fewer tokens than it asked for. A grant holds for one schedule. A scheduler
  need not use it: it leaves the request out of the schedule, and the request keeps its blocks.
- It passes over requests that are held (`RequestState.is_held`).
- It makes progress. It schedules some request whenever a request that is not held wants tokens, no step is in flight,
  and `grant` refused no request for the host's own reasons (0, although no blocks are missing). Otherwise a schedule
  may be empty. Once no more requests come and none is held, every request finishes after finitely many steps.
- It uses what the config gives. Where tokens and memory suffice, it runs `max_num_seqs` requests at a time. A request
  that is alone in a step computes all its wanted tokens, drafts included, as far as they are granted: otherwise
  speculation that the config asks for would be silently off.
- It preempts a request only where blocks are short (for another request, or for its own next tokens), or where
  `max_num_seqs` requests run and another one is to run instead.

The policy decides the order of requests (the last to arrive may be first), which ones are preempted, when those come
back (preempted and swapped requests may be behind all that wait), and how requests share tokens, drafts among them. A
policy may let some requests wait as long as others keep coming, as priorities do. The contract allows this: they finish
once the others have.

Held requests. The host holds a request that cannot run for now: a user paused it, or something that it needs is on its
way. It wants 0 tokens and keeps its status, its blocks, its position in the scheduler's order, and its draft. One with
status RUNNING counts toward `max_num_seqs` as long as it is held, so a pause costs a seat until it is preempted. A
scheduler does not schedule it, and does not preempt it because it is held. If it waits, the scheduler admits those
behind it. It may be preempted for others like any request, when the policy decides; but held requests must not stop the
rest: where otherwise no request could be scheduled, held requests are preempted. A held request may be removed at any
time; when it is resumed it goes on from where it is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from dovetail.contracts.needs import informs
from dovetail.contracts.plugin import Plugin, PluginOptions

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class RequestStatus(Enum):
    """Which blocks a request holds. Schedulers move requests between the first four; the engine sets FINISHED."""

    WAITING = "waiting"
    """The request holds no blocks."""
    RUNNING = "running"
    """The request holds blocks on the device for all its computed tokens."""
    PREEMPTED = "preempted"
    """The request's blocks were released; its tokens are known but none is computed."""
    SWAPPED = "swapped"
    """The request's blocks are in host memory."""
    FINISHED = "finished"


class RequestState:
    """One sequence, as schedulers see it. The engine owns it and writes all but `status`, which schedulers write.

    It hashes by identity, so a scheduler can keep its own data in a dict by request.
    """

    __slots__ = (
        "arrival_time",
        "extra",
        "is_held",
        "max_tokens",
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

    def __init__(
        self,
        request_id: str,
        num_prompt_tokens: int,
        priority: int = 0,
        arrival_time: float = 0.0,
        *,
        max_tokens: int = 1 << 30,
        extra: Mapping[str, Any] = _NOTHING,
    ):
        self.request_id = request_id
        """For messages: completions of one request (n > 1) share it."""
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        """Output tokens at which the request ends at the latest: `SamplingParams.max_tokens`, or fewer where
        `max_model_len` is reached before. 0: it ends when its prompt is computed (`PoolingParams`)."""
        self.num_tokens = num_prompt_tokens
        """Prompt tokens and committed output tokens."""
        self.num_computed_tokens = 0
        """Leading tokens whose keys and values are in memory; also the position of the first wanted token."""
        self.num_draft_tokens = 0
        """Guesses that wait for verification; they follow the last known token."""
        self.num_cached_tokens = 0
        """Prompt tokens that were found in the prefix cache when the request was first admitted."""
        self.num_preemptions = 0
        self.priority = priority
        """Lower runs first, as in vLLM."""
        self.arrival_time = arrival_time
        """Seconds, time.monotonic()."""
        self.extra = extra
        """`SamplingParams.extra`, read-only: what the user says of the request, for policies to read (tenant,
        deadline). Values are the user's: check them before use, since an error in `add` refuses the request."""
        self.is_held = False
        """The request wants no tokens for now. It changes between two calls of `schedule`, never during one."""
        self.status = RequestStatus.WAITING

    @property
    def num_wanted_tokens(self) -> int:
        """Tokens that a step may compute: known and draft tokens that are not computed yet; 0 while the request is
        held.

        At least 1 for every other request that was added and not removed.
        """
        if self.is_held:
            return 0
        return self.num_tokens + self.num_draft_tokens - self.num_computed_tokens


class KVMemory(Protocol):
    """The KV blocks, as schedulers use them. Every method leaves the memory consistent.

    A method that returns 0 or False has changed nothing.
    """

    block_size: int

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the device pool."""

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that no request holds, those with cached content included."""

    def awaits_prefix(self, request: Any) -> bool:
        """Returns whether a request without blocks would compute what another request already computes: the block after
        its cached prefix is part of this schedule, or of a step in flight. If it is admitted one step later, it finds
        that block in the cache. Also where the host will grant the request nothing in this step, whatever blocks are
        free. Calling it is optional: a request that is admitted at once computes the block again, or is granted 0.
        """

    def attach_prefix(self, request: Any) -> int:
        """Finds the longest cached prefix of a request without blocks, gives it those blocks, and returns their number
        of tokens, which is below `request.num_tokens` so that a token is left to compute.

        Sets `request.num_computed_tokens` to it. Call it before the first `grant` of a request; undo it with `release`
        where the request is not admitted after all.
        """

    def grant(self, request: Any, num_tokens: int, reserve: int = 0) -> int:
        """Grants the next `num_tokens` tokens of `request`, 1 to `num_wanted_tokens`, or fewer of them, in this step.

        Returns how many, 0 to `num_tokens`. The request then holds blocks for its computed and granted tokens, and, if
        its drafter caches keys and values of its own, for what the drafter writes before its drafts are verified. At
        least `reserve` blocks stay free.

        0: none in this step. Either blocks are short (`num_missing_blocks`), or the host refuses. The host may also
        round down: tokens that must not be cut (those of an image, say) are granted together or not at all. So a larger
        number may be granted where a smaller one is refused, and for a request that is refused again and again the
        scheduler must at some time ask for as many tokens as the limits allow one request. The host grants that, at
        least in part, after finitely many steps in which no other request holds blocks.

        A prompt that was asked for as a whole and is granted in part does not count toward the limits of prompts that
        are computed in part. Where one schedule asks again for the same request, the last answer that is not 0 holds.
        """

    def num_missing_blocks(self, request: Any, num_tokens: int, reserve: int = 0, without: Sequence[Any] = ()) -> int:
        """Returns how many more blocks must be free before `grant` with the same arguments finds enough; 0: it finds
        enough, and preempting others does not change its answer.

        `without`: requests that count as preempted. So a scheduler knows before it preempts any whether that is enough;
        blocks that requests share are free only without all of them. A request that is swapped out needs no `swap_in`
        before: the blocks that `swap_in` takes are counted.
        """

    def release(self, request: Any) -> None:
        """Frees all of the request's blocks; sets num_computed_tokens and num_draft_tokens to 0."""

    def swap_out(self, request: Any) -> bool:
        """Moves the request's blocks to host memory and frees them on the device; keeps num_computed_tokens and sets
        num_draft_tokens to 0. Returns False where host memory is full, no swap space is configured, no token is
        computed, the blocks were not written to yet, or the request has to be computed in one go."""

    def swap_in(self, request: Any) -> bool:
        """Moves swapped blocks back to the device. The request computes in this step only if `grant` then grants it
        tokens. Returns False where the device has too few free blocks."""


@dataclass(frozen=True, kw_only=True)
class SchedulerCapabilities:
    """What a scheduler can do."""

    priorities: bool = False
    """The scheduler uses `RequestState.priority`; otherwise the engine refuses requests that set it."""


_BINDING = informs("the contract binds every scheduler to it")


@dataclass(frozen=True)
class SchedulerLimits:
    """What the config allows in one step."""

    max_num_batched_tokens: int = field(metadata=_BINDING)
    """Most tokens computed in one step, drafts included."""
    max_num_seqs: int = field(metadata=_BINDING)
    """Most requests with status RUNNING, held ones included."""
    max_model_len: int = field(metadata=_BINDING)
    enable_chunked_prefill: bool = field(default=True, metadata=_BINDING)
    """False: a prompt is computed in one step or waits. Only where a request has more known tokens than
    max_num_batched_tokens (a long output that is recomputed, say), they are still computed in parts."""
    max_num_partial_prefills: int = field(default=1, metadata=_BINDING)
    """Most prompts that one step computes in part."""
    max_long_partial_prefills: int = field(default=1, metadata=_BINDING)
    """Most of these that are longer than long_prefill_token_threshold."""
    long_prefill_token_threshold: int = field(default=0, metadata=_BINDING)
    """A prompt with more tokens left than this is long, and gets at most this many tokens per step. 0: none is long.
    Ignored without `enable_chunked_prefill`."""


@dataclass(slots=True)
class Schedule:
    """One step's decision. `requests[i]` computes `num_tokens[i]` tokens, which `KVMemory.grant` granted it during this
    call of `schedule`. It holds each request once at most, and no held one. It may be empty."""

    requests: list[Any] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    preempted: list[Any] = field(default_factory=list)
    """All requests that were preempted in this step, for telemetry only: the engine learns from the KV memory what the
    workers must forget."""


class Scheduler(Plugin):
    """Owns the order of requests; the engine owns the requests, their tokens and their blocks."""

    capabilities: ClassVar[SchedulerCapabilities] = SchedulerCapabilities()

    def __init__(self, options: PluginOptions, limits: SchedulerLimits):
        self.options = options
        self.limits = limits

    @abstractmethod
    def add(self, request: RequestState) -> None:
        """Adds a new request (status WAITING; it may already be held)."""

    @abstractmethod
    def remove(self, request: RequestState) -> None:
        """Forgets a request, whatever its status. The engine frees its blocks."""

    @abstractmethod
    def schedule(self, memory: KVMemory) -> Schedule:
        """Decides one step.

        Respects the limits and sets statuses. Schedules some request unless the module's docstring allows an empty
        schedule. The engine checks before `add` that each request fits in empty memory. Lack of memory is no error.
        """

    @property
    @abstractmethod
    def num_running(self) -> int:
        """Number of requests with status RUNNING."""

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Number of requests that were added, are not removed, and do not run."""
