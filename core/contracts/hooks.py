"""Hooks: notifications that any number of plugins may receive (pluggy). Never on a per-token path.

A plugin names a module or object in the entry-point group ``dovetail.hooks.v1`` and marks functions with
`hookimpl`; it may take any subset of the arguments, by name. A hook that raises is reported once, with its
plugin's name, and does not stop the engine.
"""

from __future__ import annotations

from typing import Any

import pluggy

PROJECT = "dovetail"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def dovetail_engine_started(config: dict[str, Any], plugins: dict[str, str]) -> None:
    """An engine is ready. `config` is the resolved config as plain data, `plugins` maps each choice
    ("executor", "attention", ...) to the component that was chosen."""


@hookspec
def dovetail_engine_stopped() -> None:
    """An engine shut down."""


@hookspec
def dovetail_request_added(request_id: str, num_prompt_tokens: int) -> None:
    """A request was accepted."""


@hookspec
def dovetail_request_finished(request_id: str, finish_reason: str) -> None:
    """A request finished, failed or was aborted."""


@hookspec
def dovetail_step_done(step_id: int, num_running: int, num_waiting: int) -> None:
    """A step's tokens are committed."""


@hookspec
def dovetail_weights_changed(version: int) -> None:
    """The target's weights were replaced."""
