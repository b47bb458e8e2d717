"""Brings one layer's data into the tree's full form, and refuses keys that the tree does not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dovetail.config.foreign_names import hint
from dovetail.config.schema import PLACES, ComponentSection, Place, is_label, known_keys, place_at
from dovetail.config.tree import KeyPath, dotted
from dovetail.contracts.errors import ConfigError

OriginText = Callable[[KeyPath], str]


def normalise(value: Any, path: KeyPath, origin: OriginText) -> Any:
    """Expands strings that stand for a section (`attention: sdpa`), and empty sections.

    Keys that a component section does not declare are left alone: they are the plugin's options.
    Raises `ConfigError` for an unknown key, with its origin and the nearest key, or for data of another shape.
    """
    if path == ("logits_processors",) and isinstance(value, str | list | tuple):
        value = _by_name(value, origin(path))
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
        short = f"a string (its {place.shorthand}) or " if place.shorthand is not None else ""
        raise ConfigError(f"{_where(path)} must be {short}a mapping of keys, got {value!r} ({origin(path)})")
    _require_string_keys(value, path, origin)
    if not issubclass(place.section, ComponentSection):
        for key in value:
            if key not in known_keys(place.section):
                near = _hint(key, place)
                raise ConfigError(f"unknown key {dotted((*path, key))!r} ({origin((*path, key))}): {near}")
    return {key: normalise(item, (*path, key), origin) for key, item in value.items()}


def _by_name(value: str | list[Any] | tuple[Any, ...], origin: str) -> dict[str, Any]:
    """Logits processors as a list: requests find each by the name of its plugin."""
    found: dict[str, Any] = {}
    for item in [value] if isinstance(value, str) else value:
        name = item.get("name") if isinstance(item, Mapping) else item
        if not isinstance(name, str) or not is_label(name):
            raise ConfigError(
                f"logits_processors: {item!r} ({origin}) has no plain name by which requests could find it; write "
                "`logits_processors: {my_name: {name: ...}}`"
            )
        if name in found:
            raise ConfigError(f"logits_processors names {name!r} twice ({origin}); give each a name in a mapping")
        found[name] = item
    return found


def _hint(key: str, place: Place) -> str:
    near = hint(key, known_keys(place.section))
    elsewhere = [dotted((*p.path, key)) for p in PLACES if key in known_keys(p.section) and key != "name"]
    if elsewhere and "did you mean" not in near:
        return f"did you mean {' or '.join(repr(other) for other in elsewhere)}?"
    return near


def _require_string_keys(value: Mapping[Any, Any], path: KeyPath, origin: OriginText) -> None:
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(
                f"key {key!r} in {_where(path)} ({origin(path)}) is not a string; "
                "YAML reads on, off, yes, no and numbers as values: quote the key"
            )


def _where(path: KeyPath) -> str:
    return dotted(path) or "the configuration"
