"""Finds the plugin that an argument names."""

from __future__ import annotations

import difflib
from typing import Annotated

import typer
from packaging.utils import canonicalize_name

from dovetail.commands.installed import HOOKS_KIND, Entry, Registry, reference_entry
from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.contracts.kinds import KINDS

KindOption = Annotated[str | None, typer.Option("--kind", help="Only plugins of this kind.")]
_KINDS = (*KINDS, HOOKS_KIND)


def require_kind(kind: str | None) -> None:
    """Raises `ConfigError` for a kind that does not exist."""
    if kind is not None and kind not in _KINDS:
        raise unknown_kind(kind)


def unknown_kind(kind: str) -> ConfigError:
    """The error that names the kinds nearest to one that does not exist, and all of them."""
    near = difflib.get_close_matches(kind, _KINDS, n=2)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return ConfigError(f"there is no plugin kind '{kind}'.{hint} Kinds: {', '.join(_KINDS)}")


def find_entry(registry: Registry, name: str, kind: str | None) -> Entry:
    """The entry of `name`; without a kind, the one kind that knows the name, or that of a reference's class."""
    return listed_entry(registry, name, kind) or reference_entry(name)


def listed_entry(registry: Registry, name: str, kind: str | None) -> Entry | None:
    """The entry of `name`, without importing anything; None for a reference whose kind only its class has."""
    if name.endswith(".whl"):
        raise PluginError(f"'{name}' is a wheel file: install it, then name a plugin of it")
    if kind == HOOKS_KIND and ":" in name and not _hooks_of(registry, name):
        return None
    if kind is not None:
        return _find(registry, kind, name)
    bare = name.rpartition(":")[2]
    kinds = {entry.kind for entry in registry.metadata.entries if bare == entry.name}
    found = [entry for entry in (_attempt(registry, each, name) for each in sorted(kinds)) if entry is not None]
    if len(found) == 1:
        return found[0]
    if found:
        raise PluginError(
            f"'{name}' is a name of several kinds: add --kind {' or --kind '.join(e.kind for e in found)}"
        )
    if len(kinds) == 1:
        return _find(registry, kinds.pop(), name)
    if ":" in name:
        return None
    known = sorted({entry.name for entry in registry.metadata.entries})
    nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.7)
    hint = f"Did you mean {' or '.join(map(repr, nearest))}?" if nearest else "See `dovetail plugins list`."
    raise PluginError(f"there is no plugin '{name}'. {hint}")


def _find(registry: Registry, kind: str, name: str) -> Entry:
    """As `Registry.find`, for hooks too."""
    if kind != HOOKS_KIND:
        return registry.find(kind, name)
    found = _hooks_of(registry, name)
    usable = [entry for entry in found if entry.refusal is None]
    if len(usable) == 1:
        return usable[0]
    if usable:
        choices = " or ".join(f"'{entry.qualified_name}'" for entry in usable)
        raise PluginError(f"hooks '{name}' are brought by several distributions: write {choices}")
    if found:
        raise PluginError(f"{found[0].label}: {found[0].refusal}")
    known = ", ".join(sorted(entry.name for entry in registry.hook_entries()))
    raise PluginError(f"there are no hooks '{name}'. Known: {known or 'none'}")


def _hooks_of(registry: Registry, name: str) -> list[Entry]:
    """Installed hooks that are called "name" or "dist:name"."""
    owner, _, bare = name.rpartition(":")
    return [
        entry
        for entry in registry.hook_entries()
        if entry.name == bare and (not owner or canonicalize_name(owner) == canonicalize_name(entry.distribution or ""))
    ]


def _attempt(registry: Registry, kind: str, name: str) -> Entry | None:
    try:
        entry = _find(registry, kind, name)
    except PluginError:
        return None
    return entry if entry.distribution is not None else None
