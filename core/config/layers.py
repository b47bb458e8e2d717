"""What was asked for, layer upon layer, and where each value came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail.config.manifest import RecordedPlugin
from dovetail.config.schema import EngineConfig, known_keys, place_at, shown
from dovetail.config.tree import KeyPath, dotted, flatten, get, put
from dovetail.contracts.errors import ConfigError

DEFAULT = "default"


@dataclass(frozen=True)
class Origin:
    """Where a value was given."""

    text: str
    """"engine.yaml:12", "keyword", "-o", "--max-model-len", "vLLM name max_model_len"."""
    base_dir: Path
    """Folder against which relative paths at this place count."""
    over: tuple[tuple[str, Any], ...] = ()
    """(origin, value) of lower layers that this one replaced."""


@dataclass(frozen=True)
class Dropped:
    """An option of a plugin that a higher layer replaced by another."""

    path: KeyPath
    value: Any
    origin: Origin
    reason: str


@dataclass(frozen=True)
class LayeredConfig:
    """What was asked for."""

    config: EngineConfig
    origins: Mapping[KeyPath, Origin] = field(default_factory=dict)
    """Of every leaf that some layer gave."""
    dropped: tuple[Dropped, ...] = ()
    recorded: tuple[RecordedPlugin, ...] = ()
    """Plugins of the manifest that is repeated, where the config is one."""

    def origin(self, key: str | KeyPath) -> str:
        """Where the value at a key came from; "default" where no layer gave it."""
        origin = self._find(key)
        return origin.text if origin is not None else DEFAULT

    def base_dir(self, key: str | KeyPath) -> Path:
        """Folder against which a path at `key` counts: the config file's, or the working directory."""
        origin = self._find(key)
        return origin.base_dir if origin is not None else Path.cwd()

    def tree(self) -> dict[str, Any]:
        """The asked tree as plain data, defaults included, dropped options too."""
        tree = self.config.model_dump(mode="json")
        for dropped in self.dropped:
            put(tree, dropped.path, dropped.value)
        return tree

    def asked(self) -> dict[str, Any]:
        """Every value that was asked for, by dotted key, defaults included."""
        return {dotted(path): value for path, value in flatten(self.tree())}

    def _find(self, key: str | KeyPath) -> Origin | None:
        path = tuple(key.split(".")) if isinstance(key, str) else key
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path[:-1]
        return None


@dataclass(frozen=True)
class Layer:
    """What one place gives, in the tree's full form."""

    tree: dict[str, Any]
    origins: dict[KeyPath, Origin]


def unite(layers: Sequence[Layer]) -> Layer:
    """One layer of several that outrank each other in nothing."""
    merge = Merge()
    for layer in layers:
        for path, origin in layer.origins.items():
            unit = replaced_unit(path)
            other = next((o for p, o in merge.origins.items() if are_related(replaced_unit(p), unit)), None)
            if other is not None and get(merge.tree, unit) != get(layer.tree, unit):
                raise ConfigError(
                    f"{dotted(unit)} is given twice: {other.text} says {shown(unit, get(merge.tree, unit))!r}, "
                    f"{origin.text} says {shown(unit, get(layer.tree, unit))!r}; keep one"
                )
        merge.add(layer)
    return Layer(merge.tree, merge.origins)


class Merge:
    """The layers so far, lowest first."""

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        self.origins: dict[KeyPath, Origin] = {}
        self.dropped: list[Dropped] = []

    def add(self, layer: Layer) -> None:
        """Puts a layer on top."""
        self._drop_foreign_options(layer)
        replaced = {path: self._forget(replaced_unit(path), path) for path in layer.origins}
        for path, origin in layer.origins.items():
            unit = replaced_unit(path)
            put(self.tree, unit, get(layer.tree, unit))
            self.origins[path] = Origin(origin.text, origin.base_dir, replaced[path])

    def _forget(self, unit: KeyPath, path: KeyPath) -> tuple[tuple[str, Any], ...]:
        """Removes the origins that a value at `unit` replaces; returns what stood at `path` itself, newest first."""
        old = self.origins.get(path)
        over = ((old.text, shown(path, get(self.tree, path))), *old.over) if old is not None else ()
        for other in [p for p in self.origins if are_related(p, unit)]:
            del self.origins[other]
        return over

    def _drop_foreign_options(self, layer: Layer) -> None:
        """Options belong to the plugin beside which they were written: a layer that names another drops them."""
        for path, origin in layer.origins.items():
            place = place_at(path[:-1])
            if place is None or place.kind is None or path[-1] != "name" or replaced_unit(path) != path:
                continue
            below = get(self.tree, path[:-1])
            name = get(layer.tree, path)
            if not isinstance(below, dict) or below.get("name", name) == name:
                continue
            for key in [key for key in below if key not in known_keys(place.section)]:
                reason = f"an option of {below['name']!r}, which {origin.text} replaces by {name!r}"
                self._drop((*path[:-1], key), layer, reason)

    def _drop(self, path: KeyPath, layer: Layer, reason: str) -> None:
        for leaf, value in flatten(get(self.tree, path), path):
            origin = self.origins.pop(leaf)
            if not any(are_related(leaf, other) for other in layer.origins):
                self.dropped.append(Dropped(leaf, value, origin, reason))
        get(self.tree, path[:-1]).pop(path[-1])


def replaced_unit(path: KeyPath) -> KeyPath:
    """What a layer that gives `path` replaces as a whole: of the tree's one list all, since its items have no keys of
    their own that could be overridden."""
    return path[:1] if path[0] == "telemetry" else path


def are_related(one: KeyPath, other: KeyPath) -> bool:
    """Whether one key is the other or lies under it."""
    length = min(len(one), len(other))
    return one[:length] == other[:length]
