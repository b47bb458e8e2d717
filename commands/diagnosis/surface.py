"""Which modules of Dovetail are public, for plugins of which kinds, and since which version of a contract it has a
name: read from tables that the package carries."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files

from dovetail.contracts.kinds import KINDS
from dovetail.registry.entries import HOOKS_KIND

_PACKAGE = __name__.partition(".")[0]


_FOR_ALL = frozenset({"contracts", "dovetail.nn", "dovetail.testing"})
"""Surfaces that plugins of all kinds may import."""
_FOR_COMMANDS = frozenset({"dovetail", "dovetail.commands"})
"""Surfaces that only commands may import: they start engines. Others run in one, many of them in its workers. A surface
that is called like a kind is for that kind alone, as only its plugins name its version in `contract`."""
ALL_KINDS = frozenset({*KINDS, HOOKS_KIND})


@cache
def _patterns() -> Mapping[str, frozenset[str]]:
    """Pattern of public modules -> the kinds of plugins that may import them."""
    found: dict[str, frozenset[str]] = {}
    for surface, patterns in tomllib.loads(_text("public_modules.toml")).items():
        own = frozenset({"command" if surface in _FOR_COMMANDS else surface})
        found |= dict.fromkeys(patterns, ALL_KINDS if surface in _FOR_ALL else own)
    return found


@cache
def since(kind: str) -> Mapping[str, tuple[int, int]]:
    """What later minor versions of a kind's contract brought: "Class" or "Class.member" -> (major, minor)."""
    listed = tomllib.loads(_text("since.toml")).get(kind, {})
    found: dict[str, tuple[int, int]] = {}
    for version, names in listed.items():
        major, minor = map(int, version.split("."))
        found |= dict.fromkeys(names, (major, minor))
    return found


def is_public(module: str, name: str | None = None) -> bool:
    """Whether a module is public, or a name of it."""
    return bool(open_to(module, name))


def open_to(module: str, name: str | None = None) -> frozenset[str]:
    """The kinds of plugins that may import a module, or a name of it; none where it is not public."""
    if any(part.startswith("_") for part in [*module.split("."), name or ""] if part != "__init__"):
        return open_to(module) if name is not None and name.startswith("__") else frozenset()
    for pattern, kinds in _patterns().items():
        path, _, names = pattern.partition(":")
        if fnmatchcase(module, path) and (not names or (name is not None and fnmatchcase(name, names))):
            return kinds
    return frozenset()


def is_ours(module: str) -> bool:
    """Whether a module is one of Dovetail's."""
    return module.partition(".")[0] == _PACKAGE


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
