"""Reads a config file: plain data, and the line on which each value stands where the format tells."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dovetail.config.tree import KeyPath, dotted
from dovetail.contracts.errors import ConfigError


@dataclass(frozen=True)
class FileContent:
    """What a file says."""

    data: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)
    """First line of each key's value, counted from 1; empty for formats that do not tell."""


def read_file(path: Path) -> FileContent:
    """Reads YAML (.yaml, .yml), TOML or JSON, told apart by the suffix.

    Raises `ConfigError` for a file that is missing, of another kind, malformed, or that gives a key twice.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path}: a config file ends in {', '.join(sorted(_READERS))}")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist (looked in {path.absolute().parent})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from error
    try:
        return reader(text)
    except (yaml.YAMLError, tomllib.TOMLDecodeError, json.JSONDecodeError, _DuplicateKeyError) as error:
        raise ConfigError(f"config file {path} is malformed: {error}") from error


class _DuplicateKeyError(ValueError):
    pass


def _read_yaml(text: str) -> FileContent:
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return FileContent({})
        # Before construction, since that folds merge keys (<<) into the mapping, where they may be overridden.
        _refuse_duplicates(node, ())
        data = loader.construct_document(node)
    finally:
        loader.dispose()
    return FileContent(data, dict(_node_lines(node, ())))


def _refuse_duplicates(node: yaml.Node, path: KeyPath) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            if name in seen:
                raise _DuplicateKeyError(f"line {key.start_mark.line + 1} gives {dotted((*path, name))} a second time")
            seen.add(name)
            _refuse_duplicates(value, (*path, name))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _refuse_duplicates(value, (*path, str(index)))


def _node_lines(node: yaml.Node, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    yield path, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _node_lines(value, (*path, str(key.value)))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _node_lines(value, (*path, str(index)))


def _read_toml(text: str) -> FileContent:
    return FileContent(tomllib.loads(text))


def _read_json(text: str) -> FileContent:
    return FileContent(json.loads(text, object_pairs_hook=_unique_keys))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:
            raise _DuplicateKeyError(f"key {key!r} stands twice in one object")
        data[key] = value
    return data


_READERS: dict[str, Callable[[str], FileContent]] = {
    ".json": _read_json,
    ".toml": _read_toml,
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
}
