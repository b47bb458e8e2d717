"""What comes with a request beside its prompt and its sampling parameters, checked before anything keeps it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real

from dovetail.contracts.errors import RequestError


def check_order(priority: object, arrival_time: object) -> None:
    """Raises `RequestError` for what requests cannot be sorted by."""
    if isinstance(priority, bool) or not isinstance(priority, Integral):
        raise RequestError(f"priority must be an integer, got {priority!r}")
    is_time = isinstance(arrival_time, Real) and not isinstance(arrival_time, bool) and math.isfinite(arrival_time)
    if arrival_time is not None and not is_time:
        raise RequestError(f"arrival_time must be None or seconds of time.monotonic(), got {arrival_time!r}")


def as_request_ids(given: object) -> list[str]:
    """One request id or many. Raises `RequestError` for anything else."""
    if isinstance(given, str):
        return [given]
    ids: list[str] = []
    for request_id in given if isinstance(given, Iterable) else (given,):
        if not isinstance(request_id, str):
            raise RequestError(f"a request id is a string, got {request_id!r}")
        ids.append(request_id)
    return ids
