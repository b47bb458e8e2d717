"""Nested plain data, addressed by dotted keys."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

KeyPath = tuple[str, ...]


def flatten(tree: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Each leaf with its path. Lists are leaves, unless they hold mappings; so are empty mappings."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from flatten(value, (*path, str(key)))
    elif isinstance(tree, list) and any(isinstance(item, Mapping) for item in tree):
        for index, item in enumerate(tree):
            yield from flatten(item, (*path, str(index)))
    else:
        yield path, tree


def dotted(path: KeyPath) -> str:
    """The key as users write it."""
    return ".".join(path)


def get(tree: Any, path: KeyPath) -> Any:
    """The value at `path`; None where nothing stands."""
    for key in path:
        if isinstance(tree, Mapping):
            tree = tree.get(key)
        elif isinstance(tree, list) and key.isdigit() and int(key) < len(tree):
            tree = tree[int(key)]
        else:
            return None
    return tree


def put(tree: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Sets the value at `path`, in place; mappings that lack are made."""
    node: Any = tree
    for key in path[:-1]:
        if isinstance(node, list):
            node = node[int(key)]
            continue
        if not isinstance(node.get(key), dict | list):
            node[key] = {}
        node = node[key]
    if isinstance(node, list):
        node[int(path[-1])] = value
    else:
        node[path[-1]] = value


def nested(path: KeyPath, value: Any) -> dict[str, Any]:
    """A tree with one leaf."""
    tree: dict[str, Any] = {}
    put(tree, path, value)
    return tree


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown word: the nearest known ones as a question, or else all that is known."""
    names = sorted(set(known))
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(repr(name) for name in near)}?"
    return f"known: {', '.join(names)}" if names else "nothing is known here"
