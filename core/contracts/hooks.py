"""Hooks: what happens to an engine, for any number of plugins that listen (pluggy). What is measured of steps and
requests goes to telemetry sinks (`dovetail.contracts.telemetry`).

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
def dovetail_weights_changed(version: int) -> None:
    """The target's weights were replaced, for the `version`-th time since the engine started."""
