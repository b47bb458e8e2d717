"""Pauses and sleep of an engine. A pause takes new requests, and holds them."""

from __future__ import annotations

from typing import Final, Literal

from dovetail.contracts.errors import ConfigError, RequestError

PauseMode = Literal["abort", "wait", "keep"]
"""abort: requests end, with finish_reason "abort". wait: they run to their ends. keep: they are held where they are."""
PAUSE_MODES: Final[tuple[PauseMode, ...]] = ("abort", "wait", "keep")


class EngineConflict(RequestError):
    """What was asked is illegal in the state that the engine is in: paused, asleep, or not. Nothing changed."""


def as_pause_mode(mode: object) -> PauseMode:
    """Returns `mode`. Raises `RequestError` for what is none."""
    for known in PAUSE_MODES:
        if mode == known:
            return known
    raise RequestError(f"pause mode {mode!r}: it is one of {', '.join(PAUSE_MODES)}")


def check_level(level: object) -> None:
    """Raises `ConfigError` for what is no level of sleep."""
    if type(level) is not int or level not in (1, 2):
        raise ConfigError(f"sleep level {level!r}: it is 1 (weights in host memory) or 2 (weights read again)")
