"""Errors of one thread that others must hear of, and of requests that failed."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from dovetail.contracts.errors import GenerationError, PluginError
from dovetail.contracts.outputs import RequestOutput


def check_outputs(outputs: Sequence[RequestOutput]) -> None:
    """Raises `GenerationError` where some of them are of requests that failed."""
    failures = [output for output in outputs if output.error is not None]
    if failures:
        first = failures[0]
        raise GenerationError(
            f"{len(failures)} of {len(outputs)} requests failed; {first.request_id}: {first.error}", list(outputs)
        )


def raised_elsewhere(error: BaseException) -> Exception:
    """A new exception, caused by `error`, to be raised in another thread: of the same type where that can be.

    One exception raised in several places would pile up their tracebacks. SystemExit, KeyboardInterrupt and the like
    mean their own thread only; they become a `PluginError`.
    """
    told: object = None
    if isinstance(error, Exception):
        try:
            told = copy.copy(error)
        except Exception:  # of a type whose constructor wants more than its arguments
            told = None
    if not isinstance(told, Exception) or type(told) is not type(error):
        told = PluginError(
            f"{type(error).__name__} ({error}) was raised in the engine's thread while a step or a call ran: a plugin"
            " must raise an Exception instead. The requests that were under way have failed"
        )
    told.__cause__ = error
    return told
