"""The run manifest: a resolved configuration as a JSON file from which the run can be repeated."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.config.resolved import Component, ResolvedConfig
from dovetail.contracts.errors import ConfigError
from dovetail.registry.distributions import installed_versions

MARK = "dovetail_manifest"
VERSION = 1
_RECORDED_DISTRIBUTIONS = ("dovetail", "torch", "transformers", "tokenizers", "safetensors", "numpy")


@dataclass(frozen=True)
class RecordedPlugin:
    """A plugin that the recorded run used."""

    kind: str
    name: str
    distribution: str | None
    version: str | None


@dataclass(frozen=True)
class Manifest:
    """What a manifest says to a later run."""

    values: Mapping[str, Any]
    """The resolved tree; it resolves to itself."""
    plugins: tuple[RecordedPlugin, ...]


def manifest(resolved: ResolvedConfig, origins: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The manifest of a run as plain data. `origins`: where each value was asked for, by dotted key."""
    return {
        MARK: VERSION,
        "values": dict(resolved.values),
        "origins": dict(origins or {}),
        "decisions": [{"key": d.key, "asked": d.asked, "got": d.got, "reason": d.reason} for d in resolved.decisions],
        "plugins": [_recorded(component) for component in resolved.components()],
        "plugin_hash": resolved.plugin_hash,
        "versions": {"python": platform.python_version(), **installed_versions(_RECORDED_DISTRIBUTIONS)},
        "platform": {"machine": platform.machine(), "system": sys.platform, "device": resolved.device_type},
    }


def write_manifest(resolved: ResolvedConfig, path: str | Path, origins: Mapping[str, str] | None = None) -> None:
    """Writes the manifest of a run: every resolved value, its origin, and the versions of what runs it.

    `LLM(config=path)` repeats the run.
    """
    text = json.dumps(manifest(resolved, origins), indent=2, ensure_ascii=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


def is_manifest(data: Any) -> bool:
    """Whether a config file is a manifest rather than a tree."""
    return isinstance(data, Mapping) and MARK in data


def read_manifest(data: Mapping[str, Any], name: str) -> Manifest:
    """Reads what `manifest` made. Raises `ConfigError` for another version of the format."""
    if data[MARK] != VERSION:
        raise ConfigError(f"{name} is a manifest of format {data[MARK]!r}; this version of Dovetail reads {VERSION}")
    if not isinstance(data.get("values"), Mapping):
        raise ConfigError(f"{name} is a manifest without values: write it again with `dovetail explain --manifest`")
    plugins = tuple(
        RecordedPlugin(p["kind"], p["name"], p.get("distribution"), p.get("version")) for p in data.get("plugins", ())
    )
    return Manifest(data["values"], plugins)


def differences(recorded: tuple[RecordedPlugin, ...], components: list[Component]) -> list[str]:
    """One line for each plugin whose version is not the recorded one."""
    now = {(c.kind, c.name): c for c in components}
    lines = []
    for plugin in recorded:
        component = now.get((plugin.kind, plugin.name))
        if component is not None and (component.distribution, component.version) != (
            plugin.distribution,
            plugin.version,
        ):
            lines.append(
                f"{plugin.kind} {plugin.name}: the manifest was written with {plugin.distribution} {plugin.version}, "
                f"installed is {component.distribution} {component.version}"
            )
    return lines


def _recorded(component: Component) -> dict[str, Any]:
    return {
        "kind": component.kind,
        "name": component.name,
        "reference": component.reference,
        "distribution": component.distribution,
        "version": component.version,
    }
