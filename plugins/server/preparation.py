"""What a server adds to the config of its engines, and refuses in it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from dovetail.commands import LayeredConfig, ResolvedServer
from dovetail.commands.telemetry import with_sink
from dovetail.contracts.errors import ConfigError

_METRICS = "prometheus"
"""The telemetry sink that the route `metrics` shows."""


def prepared(layered: LayeredConfig, server: ResolvedServer) -> LayeredConfig:
    """Returns the config of the engines behind a server. Raises `ConfigError` for an adapter that no request could
    choose."""
    _check_adapter_names(layered, tuple(server.section["served_model_name"]) or (str(layered.config.model.path),))
    layered = _reading_ahead(layered)
    return with_sink(layered, _METRICS) if "metrics" in server.routes else layered


def _check_adapter_names(layered: LayeredConfig, names: Collection[str]) -> None:
    for name in names:
        if name in layered.config.lora.modules:
            origin = layered.origin(("lora", "modules", name))
            raise ConfigError(
                f"lora.modules ({origin}) calls an adapter {name!r}, which is the name of the model itself: call one"
                " of them otherwise (server.served_model_name)"
            )


def _reading_ahead(layered: LayeredConfig) -> LayeredConfig:
    """No request of a server waits for the vocabulary of grammars, unless the config says otherwise."""
    grammar = layered.config.grammar
    if grammar is None or grammar.read_ahead is not None:
        return layered
    changed = grammar.model_copy(update={"read_ahead": True})
    return replace(layered, config=layered.config.model_copy(update={"grammar": changed}))
