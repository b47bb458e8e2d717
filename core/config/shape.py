"""Brings one layer's data into the tree's full form, and refuses keys that the tree does not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dovetail.config.schema import PLACES, ComponentSection, Place, known_keys, place_at
from dovetail.config.tree import KeyPath, dotted, nearest
from dovetail.contracts.errors import ConfigError

OriginText = Callable[[KeyPath], str]


def normalise(value: Any, path: KeyPath, origin: OriginText) -> Any:
    """Expands strings that stand for a section (`attention: sdpa`), and empty sections.

    Keys that a component section does not declare are left alone: they are the plugin's options.
    Raises `ConfigError` for an unknown key, with its origin and the nearest key, or for data of another shape.
    """
    place = place_at(path)
    if place is not None:
        return _normalise_section(value, path, place, origin)
    if isinstance(value, Mapping):
        _require_string_keys(value, path, origin)
        return {key: normalise(item, (*path, key), origin) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [normalise(item, (*path, str(index)), origin) for index, item in enumerate(value)]
    return value


def _normalise_section(value: Any, path: KeyPath, place: Place, origin: OriginText) -> Any:
    if value is None:
        # A section whose lines are all commented out reads as null.
        return None if place.nullable else {}
    if isinstance(value, str) and place.shorthand is not None:
        value = {place.shorthand: value}
    if isinstance(value, place.section):
        value = value.model_dump(exclude_unset=True)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{_where(path)} must be a mapping of keys, got {value!r} ({origin(path)})")
    _require_string_keys(value, path, origin)
    if not issubclass(place.section, ComponentSection):
        for key in value:
            if key not in known_keys(place.section):
                hint = _hint(key, place)
                raise ConfigError(f"unknown key {dotted((*path, key))!r} ({origin((*path, key))}): {hint}")
    return {key: normalise(item, (*path, key), origin) for key, item in value.items()}


def _hint(key: str, place: Place) -> str:
    hint = nearest(key, known_keys(place.section))
    elsewhere = [dotted((*p.path, key)) for p in PLACES if key in known_keys(p.section) and key != "name"]
    if elsewhere and "did you mean" not in hint:
        return f"did you mean {' or '.join(repr(other) for other in elsewhere)}?"
    return hint


def _require_string_keys(value: Mapping[Any, Any], path: KeyPath, origin: OriginText) -> None:
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(
                f"key {key!r} in {_where(path)} ({origin(path)}) is not a string; "
                "YAML reads on, off, yes, no and numbers as values: quote the key"
            )


def _where(path: KeyPath) -> str:
    return dotted(path) or "the configuration"
