"""Telemetry sinks that a command needs besides those of the config."""

from __future__ import annotations

from dataclasses import replace

from dovetail.config.layers import LayeredConfig
from dovetail.config.schema import NamedSection


def with_sink(layered: LayeredConfig, name: str) -> LayeredConfig:
    """The configuration with the telemetry sink `name` behind its own; as it is where it has that one."""
    sinks = layered.config.telemetry
    if any(sink.name.rpartition(":")[2] == name for sink in sinks):
        return layered
    config = layered.config.model_copy(update={"telemetry": [*sinks, NamedSection(name=name)]})
    return replace(layered, config=config)
