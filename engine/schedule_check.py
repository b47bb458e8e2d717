"""Whether a scheduler kept its contract: told at once and by name, before a wrong plan reaches a worker."""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.contracts.errors import PluginError
from dovetail.contracts.scheduler import KVMemory, Schedule, Scheduler
from dovetail.engine.sequence import Sequence


def ask_scheduler(scheduler: Scheduler, memory: KVMemory) -> Schedule:
    """The scheduler's decision. Raises `PluginError` for one that breaks the contract, or that raises."""
    name = type(scheduler).__name__
    try:
        schedule = scheduler.schedule(memory)
    except Exception as error:
        raise scheduler_raised(scheduler, error) from error
    if not isinstance(schedule, Schedule):
        raise PluginError(_broken(name, f"schedule() returned a {type(schedule).__name__}, not a Schedule"))
    try:
        _check(schedule, name)
    except (AttributeError, TypeError) as error:
        raise PluginError(_broken(name, f"its Schedule holds what cannot be there ({error})")) from error
    return schedule


def check_live(scheduler: Scheduler, schedule: Schedule, live: Mapping[int, Sequence]) -> None:
    """Raises `PluginError` for a request that has ended, by its key: nobody would ever free its blocks again."""
    for request in schedule.requests:
        if request.key not in live:
            raise PluginError(
                _broken(type(scheduler).__name__, f"request {request.request_id} is scheduled, although it was removed")
            )


def scheduler_raised(scheduler: Scheduler, error: Exception) -> PluginError:
    """What is told of an error of the scheduler's own."""
    return PluginError(f"scheduler {type(scheduler).__name__} raised {type(error).__name__}: {error}")


def _check(schedule: Schedule, name: str) -> None:
    requests, counts = schedule.requests, schedule.num_tokens
    if len(requests) != len(counts):
        raise PluginError(_broken(name, f"it names {len(requests)} requests and {len(counts)} token counts"))
    for request, count in zip(requests, counts, strict=True):
        wanted = request.num_tokens + request.num_draft_tokens - request.num_computed_tokens
        if not 1 <= count <= wanted:
            raise PluginError(
                _broken(name, f"request {request.request_id} wants {wanted} tokens and is scheduled with {count}")
            )
        if not request.block_ids:
            raise PluginError(
                _broken(name, f"request {request.request_id} is scheduled without blocks: allocate first")
            )
    if len(set(requests)) != len(requests):
        raise PluginError(_broken(name, "a request stands in one schedule twice"))


def _broken(name: str, what: str) -> str:
    return f"scheduler {name} breaks the scheduler's contract: {what}; choose another scheduler.name"
