"""Halves of surrogate pairs: what JSON can spell (`"\\ud83e"`) and no text has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def half_pair_in(value: Any) -> str | None:
    """Where in a JSON value a text has half of a surrogate pair, dotted; "" for the value itself, None for nowhere. Of
    an object with such a key it is the place of the object."""
    keys: list[object] = []
    """Of the values that are looked through now, the outermost first."""
    stack: list[Iterator[tuple[object, Any]]] = [iter([("", value)])]
    while stack:
        key, found = next(stack[-1], (None, None))
        if key is None:
            stack.pop()
            del keys[-1:]
        elif _has_half(found):
            return ".".join(map(str, [*keys, key][1:]))
        elif isinstance(found, dict | list):
            keys.append(key)
            stack.append(iter(found.items() if isinstance(found, dict) else enumerate(found)))
    return None


def _has_half(value: Any) -> bool:
    """Of a text, or of the keys of an object."""
    texts = [value] if isinstance(value, str) else value if isinstance(value, dict) else ()
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        return True
    return False
