"""Which modules of Dovetail are public, and since which version of a contract it has a name: read from tables that the
package carries."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files

_PACKAGE = __name__.partition(".")[0]


@cache
def public_patterns() -> tuple[str, ...]:
    """Patterns of the public modules."""
    listed = tomllib.loads(_text("public_modules.toml"))
    return tuple(dict.fromkeys(pattern for patterns in listed.values() for pattern in patterns))


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
    if any(part.startswith("_") for part in [*module.split("."), name or ""] if part != "__init__"):
        return name is not None and name.startswith("__") and is_public(module)
    for pattern in public_patterns():
        path, _, names = pattern.partition(":")
        if fnmatchcase(module, path) and (not names or (name is not None and fnmatchcase(name, names))):
            return True
    return False


def is_ours(module: str) -> bool:
    """Whether a module is one of Dovetail's."""
    return module.partition(".")[0] == _PACKAGE


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
