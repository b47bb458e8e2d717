"""Whether a scheduler kept its contract: reported at once and by name, before a wrong plan reaches a worker."""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.contracts.errors import PluginError
from dovetail.contracts.scheduler import KVMemory, RequestStatus, Schedule, Scheduler, SchedulerLimits
from dovetail.engine.kv.manager import KVCacheManager
from dovetail.engine.sequence import Sequence


def ask_scheduler(
    scheduler: Scheduler,
    limits: SchedulerLimits,
    memory: KVCacheManager,
    live: Mapping[int, Sequence],
    view: KVMemory | None = None,
) -> Schedule:
    """The scheduler's decision about `live`, by seq_id. Raises `PluginError` for one that breaks the contract, or that
    raises. `limits` are the config's: a scheduler may keep others. `view`: the memory as the scheduler sees it."""
    name = type(scheduler).__name__
    memory.begin_schedule()
    try:
        schedule = scheduler.schedule(view or memory)
    except Exception as error:
        raise scheduler_raised(scheduler, error) from error
    if not isinstance(schedule, Schedule):
        raise PluginError(_broken(name, f"schedule() returned a {type(schedule).__name__}, not a Schedule"))
    grants = memory.grants
    try:
        seq_ids = [request.seq_id for request in schedule.requests]
        # Mostly all that was granted is used, in the order in which it was: one comparison for all requests.
        if seq_ids != list(grants) or schedule.num_tokens != list(grants.values()):
            _check(schedule, grants, name)
            memory.end_schedule(seq_ids)
        if not grants.keys() <= live.keys():
            _check_live(schedule, live, name)
        if sum(schedule.num_tokens) > limits.max_num_batched_tokens or len(seq_ids) > limits.max_num_seqs:
            raise PluginError(_broken(name, _excess(schedule, limits)))
    except (AttributeError, TypeError) as error:
        raise PluginError(_broken(name, f"its Schedule holds what cannot be there ({error})")) from error
    return schedule


def check_entering(scheduler: Scheduler, limits: SchedulerLimits, entered: list[Sequence], num_on_workers: int) -> None:
    """Whether the workers can take those that a plan brings to them; they hold `num_on_workers` others. Raises
    `PluginError` where the scheduler runs too many requests, or one that does not have status RUNNING."""
    name = type(scheduler).__name__
    num_running = num_on_workers + len(entered)
    if num_running > limits.max_num_seqs:
        raise PluginError(
            _broken(name, f"it runs {num_running} requests, held ones included; max_num_seqs is {limits.max_num_seqs}")
        )
    for request in entered:
        if request.status is not RequestStatus.RUNNING:
            raise PluginError(
                _broken(name, f"request {request.request_id} is scheduled with status {request.status}, not RUNNING")
            )


def check_progress(scheduler: Scheduler, live: Mapping[int, Sequence]) -> None:
    """What an empty schedule means while no step is in flight. Raises `PluginError` where a request wants tokens."""
    starved = [sequence.request_id for sequence in live.values() if not sequence.is_held]
    if starved:
        num_held = len(live) - len(starved)
        raise PluginError(
            _broken(
                type(scheduler).__name__,
                f"it schedules nothing, although request {starved[0]} wants tokens and no step is in flight"
                f" ({len(starved)} sequences want tokens, {num_held} are held; the scheduler counts"
                f" {scheduler.num_running} running and {scheduler.num_waiting} waiting)",
            )
        )


def scheduler_raised(scheduler: Scheduler, error: Exception) -> PluginError:
    """What is reported of an error of the scheduler's own."""
    return PluginError(f"scheduler {type(scheduler).__name__} raised {type(error).__name__}: {error}")


def _check(schedule: Schedule, grants: Mapping[int, int], name: str) -> None:
    requests, counts = schedule.requests, schedule.num_tokens
    if len(requests) != len(counts):
        raise PluginError(_broken(name, f"it names {len(requests)} requests and {len(counts)} token counts"))
    if len(set(requests)) != len(requests):
        raise PluginError(_broken(name, "a request is in one schedule twice"))
    for request, count in zip(requests, counts, strict=True):
        wanted = request.num_tokens + request.num_draft_tokens - request.num_computed_tokens
        if not 1 <= count <= wanted or grants.get(request.seq_id) != count or request.is_held:
            raise PluginError(_broken(name, f"request {request.request_id} {_fault(request, count, grants)}"))


def _excess(schedule: Schedule, limits: SchedulerLimits) -> str:
    """Which limit a schedule is above."""
    num_tokens = sum(schedule.num_tokens)
    if num_tokens > limits.max_num_batched_tokens:
        return (
            f"it schedules {num_tokens} tokens in one step; max_num_batched_tokens is {limits.max_num_batched_tokens}"
        )
    return f"it schedules {len(schedule.requests)} requests in one step; max_num_seqs is {limits.max_num_seqs}"


def _check_live(schedule: Schedule, live: Mapping[int, Sequence], name: str) -> None:
    """Nobody would ever free the blocks of a request that has ended."""
    for request in schedule.requests:
        if request.seq_id not in live:
            raise PluginError(_broken(name, f"request {request.request_id} is scheduled, although it was removed"))


def _fault(request: Sequence, count: int, grants: Mapping[int, int]) -> str:
    """What is wrong about a request that is scheduled with `count` tokens."""
    if request.is_held:
        return "is scheduled although it is held (RequestState.is_held): pass it over"
    wanted = request.num_wanted_tokens
    if not 1 <= count <= wanted:
        return f"wants {wanted} tokens and is scheduled with {count}"
    if request.seq_id not in grants:
        return f"is scheduled with {count} tokens and was granted none: call memory.grant in each schedule"
    return f"was granted {grants[request.seq_id]} tokens and is scheduled with {count}: use what memory.grant answers"


def _broken(name: str, what: str) -> str:
    return f"scheduler {name} breaks the scheduler's contract: {what}; choose another scheduler.name"
