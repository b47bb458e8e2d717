"""Hooks: notifications of an engine's life, for any number of plugins that listen (pluggy). Measurements of steps and
requests go to telemetry sinks (`dovetail.contracts.telemetry`).

A plugin names a module or object in the entry-point group ``dovetail.hooks.v1`` and marks functions with `hookimpl`; it
may take any subset of the arguments, by name. The host reports a hook that raises once, with its plugin's name, and the
engine goes on.
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
    """Holds and resumes requests of one engine. A plugin may keep it and call it from any thread, also during a step.

    Calls take effect in their order, before the next step is scheduled; tokens of steps in flight still come. Ids of
    requests that have ended by then are ignored.
    """

    def hold(self, request_ids: str | Iterable[str]) -> None:
        """Holds these requests: they compute no tokens until they are resumed. They keep their KV blocks, their drafts
        and their position in the scheduler's order, but may be preempted where memory is short."""

    def resume(self, request_ids: str | Iterable[str]) -> None:
        """Resumes these requests: they go on from where they are."""


@hookspec
def dovetail_engine_started(config: dict[str, Any], plugins: dict[str, str], control: RequestControl) -> None:
    """An engine is ready. `config` is the resolved config as plain data, `control` holds requests.

    `plugins` maps the path of each choice in the config to the class that was chosen ("package.module:Class" or
    "/absolute/file.py:Class"): "executor", "attention", "scheduler", "dialect"; "model.family", "model.weight_format",
    "model.source", "model.quantization", "model.operators"; "grammar"; "logits_processors.LABEL", "telemetry.INDEX";
    "speculative.acceptance"; for each drafter "speculative.drafters.NAME", with ".length", ".attention" and
    ".quantization" behind it, and ".model.family" and so on for a model of its own. What was not chosen (no
    quantization, no drafters) is absent.
    """


@hookspec
def dovetail_engine_stopped() -> None:
    """An engine shut down."""


@hookspec
def dovetail_request_added(request_id: str, params: SamplingParams, control: RequestControl) -> None:
    """A request was queued, before any step computes it: a request that is held here starts when it is resumed.
    `params.extra` has its user's values for plugins. Telemetry sinks are notified of its end."""


@hookspec
def dovetail_weights_changed(version: int) -> None:
    """The target's weights were replaced, for the `version`-th time since the engine started."""
