"""Reads a config file: plain data, and the line on which each value stands where the format tells."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Iterator
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


_MOST_BYTES = 2**22
_MOST_VALUES = 100_000
"""In one file, each alias counted as what it stands for."""
_MOST_LEVELS = 64
_SHOWN = 40


def is_config_file(path: Path) -> bool:
    """Whether the name is that of a config file, whether there is one or not."""
    return path.suffix.lower() in _READERS and not path.is_dir()


def read_file(path: Path, kind: str = "config file") -> FileContent:
    """Reads YAML (.yaml, .yml), TOML or JSON, told apart by the suffix. `kind`: what errors call the file.

    Raises `ConfigError` for a file that is missing, of another kind, malformed, or that gives a key twice, and for one
    that is larger, or nested deeper, than what anybody writes.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        hint = (
            f"; if this is a model, its place is model.path (--model {path}, model= in Python)" if path.exists() else ""
        )
        raise ConfigError(f"{path} is no {kind}, whose name ends in {', '.join(sorted(_READERS))}{hint}")
    text = _read_text(path, kind)
    try:
        return reader(text)
    except RecursionError:
        raise ConfigError(f"{kind} {path} is malformed: {_TOO_DEEP}") from None
    except Exception as error:
        # The readers let through what int(), float() and the like say of a value that is none.
        raise ConfigError(f"{kind} {path} is malformed: {error}") from error


def parse_value(text: str) -> Any:
    """One value in YAML. Raises `ValueError` for what is not YAML, or too large for a value."""
    try:
        return _read_yaml(text).data if text.strip() else None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except Exception as error:  # as in read_file
        raise ValueError(str(error)) from error


def _read_text(path: Path, kind: str) -> str:
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{kind} {path} is no regular file")  # a pipe would be waited for
        with path.open(encoding="utf-8") as file:
            text = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{kind} {path} does not exist (looked in {path.absolute().parent})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{kind} {path} cannot be read: {error}") from error
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"{kind} {path} has more than {_MOST_BYTES} characters: nobody wrote that")
    return text


_TOO_DEEP = f"it is nested more than {_MOST_LEVELS} levels deep"


def _refuse_bombs(root: Any, children: Callable[[Any], Iterable[Any]]) -> None:
    """Raises `ValueError` for data that is nested too deeply, without end even, or that grows out of all measure when
    its aliases are followed."""
    waiting = [(root, 1)]
    num_values = 0
    while waiting:
        value, level = waiting.pop()
        num_values += 1
        if level > _MOST_LEVELS:
            raise ValueError(_TOO_DEEP)
        if num_values > _MOST_VALUES:
            raise ValueError(f"it has more than {_MOST_VALUES} values, each alias counted as what it stands for")
        waiting += [(child, level + 1) for child in children(value)]


def _plain_children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _node_children(node: yaml.Node) -> Iterable[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else ()


class _Loader(yaml.SafeLoader):
    """PyYAML's, which lets through what Python says of a value that is none of its tag."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if not isinstance(node, yaml.ScalarNode):
                raise
            reason = f": {error}" if isinstance(error, ValueError) else ""
            kind = node.tag.rpartition(":")[2]
            raise ValueError(
                f"line {node.start_mark.line + 1}: {node.value[:_SHOWN]!r} is no {kind}{reason}"
            ) from error


class _DuplicateKeyError(ValueError):
    pass


def _read_yaml(text: str) -> FileContent:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return FileContent({})
        _refuse_bombs(node, _node_children)
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
    return _checked(tomllib.loads(text))


def _read_json(text: str) -> FileContent:
    return _checked(json.loads(text, object_pairs_hook=_unique_keys))


def _checked(data: Any) -> FileContent:
    _refuse_bombs(data, _plain_children)
    return FileContent(data)


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
