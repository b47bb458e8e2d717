"""Hooks: what happens to an engine, for any number of plugins that listen (pluggy). What is measured of steps and
requests goes to telemetry sinks (`dovetail.contracts.telemetry`).

A plugin names a module or object in the entry-point group ``dovetail.hooks.v1`` and marks functions with
`hookimpl`; it may take any subset of the arguments, by name. A hook that raises is reported once, with its
plugin's name, and does not stop the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import pluggy

from dovetail.contracts.sampling import SamplingParams

PROJECT = "dovetail"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class RequestControl(Protocol):
    """Requests of one engine, as plugins may hold them. May be kept, and called from any thread, also during a step.

    A call takes effect before the next step is scheduled, in the order of calls; tokens of steps in flight still come.
    Ids of requests that have ended by then are passed over.
    """

    def hold(self, request_ids: str | Iterable[str]) -> None:
        """These requests compute nothing until they are resumed; they keep their KV blocks, their drafts and their
        position in the scheduler's order. Others may be given their blocks where memory is short."""

    def resume(self, request_ids: str | Iterable[str]) -> None:
        """These requests go on from where they are."""


@hookspec
def dovetail_engine_started(config: dict[str, Any], plugins: dict[str, str], control: RequestControl) -> None:
    """An engine is ready. `config` is the resolved config as plain data, `plugins` maps each choice
    ("executor", "attention", ...) to the component that was chosen, `control` holds requests."""


@hookspec
def dovetail_engine_stopped() -> None:
    """An engine shut down."""


@hookspec
def dovetail_request_added(request_id: str, params: SamplingParams, control: RequestControl) -> None:
    """A request was queued, and no step has computed any of it: a request that is held here starts when it is resumed.
    `params.extra` is what its user says to plugins. Its end is reported to telemetry sinks."""


@hookspec
def dovetail_weights_changed(version: int) -> None:
    """The target's weights were replaced, for the `version`-th time since the engine started."""
