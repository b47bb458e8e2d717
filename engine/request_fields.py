"""What comes with a request beside its prompt and its sampling parameters, checked before anything keeps it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from dovetail.contracts.engine_client import EngineFacts
from dovetail.contracts.errors import RequestError


def check_order(priority: object, arrival_time: object) -> None:
    """Raises `RequestError` for what requests cannot be sorted by."""
    if isinstance(priority, bool) or not isinstance(priority, Integral):
        raise RequestError(f"priority must be an integer, got {priority!r}")
    is_time = isinstance(arrival_time, Real) and not isinstance(arrival_time, bool) and math.isfinite(arrival_time)
    if arrival_time is not None and not is_time:
        raise RequestError(f"arrival_time must be None or seconds of time.monotonic(), got {arrival_time!r}")


def check_priority(priority: int, facts: EngineFacts) -> None:
    """Raises `RequestError` for a priority that the scheduler would not look at."""
    if priority != 0 and not facts.has_priorities:
        raise RequestError(
            f"priority is {priority}, but scheduler {facts.scheduler!r} ignores it: leave"
            " priority at 0, or configure a scheduler whose capabilities have priorities=True"
        )


def check_request_id(request_id: object) -> None:
    """Raises `RequestError` for what cannot name a request."""
    if not isinstance(request_id, str) or not request_id:
        raise RequestError(f"a request id is a string that is not empty, got {request_id!r}")


def check_salt(cache_salt: object) -> None:
    """Raises `RequestError` for what keeps no prefixes apart."""
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise RequestError(f"cache_salt must be text, got {cache_salt!r}")


def check_user(user: object) -> None:
    """Raises `RequestError` for what names no user."""
    if user is not None and not isinstance(user, str):
        raise RequestError(f"user must be text, got {user!r}")


def as_trace_context(trace_headers: object) -> dict[str, str]:
    """Of a request's headers those of W3C Trace Context, by their names in lower case. Raises `RequestError` for what
    is no mapping of text to text."""
    if trace_headers is None:
        return {}
    if not isinstance(trace_headers, Mapping):
        raise RequestError(f"trace_headers must be a mapping of header names to values, got {trace_headers!r}")
    found = {}
    for name, value in trace_headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise RequestError(f"trace_headers must map text to text, got {name!r}: {value!r}")
        if name.lower() in ("traceparent", "tracestate"):
            found[name.lower()] = value
    return found


def as_request_ids(given: object) -> list[str]:
    """One request id or many. Raises `RequestError` for anything else."""
    ids: list[Any] = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    for request_id in ids:
        check_request_id(request_id)
    return ids
