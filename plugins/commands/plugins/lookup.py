"""Finds the plugin that an argument names."""

from __future__ import annotations

import difflib
from typing import Annotated

import typer

from dovetail.commands.installed import Entry, Registry, reference_entry
from dovetail.contracts.errors import PluginError
from dovetail.contracts.kinds import KINDS

KindOption = Annotated[str | None, typer.Option("--kind", help="Only plugins of this kind.")]


def require_kind(kind: str | None) -> None:
    if kind is not None and kind not in KINDS:
        raise PluginError(f"there is no plugin kind '{kind}'; kinds: {', '.join(KINDS)}")


def find_entry(registry: Registry, name: str, kind: str | None) -> Entry:
    """The entry of `name`; without a kind, the one kind that knows the name, or that of a reference's class."""
    return listed_entry(registry, name, kind) or reference_entry(name)


def listed_entry(registry: Registry, name: str, kind: str | None) -> Entry | None:
    """The entry of `name`, without importing anything; None for a reference whose kind only its class tells."""
    if kind is not None:
        return registry.find(kind, name)
    bare = name.rpartition(":")[2]
    kinds = {entry.kind for entry in registry.metadata.entries if bare == entry.name and entry.kind in KINDS}
    found = [entry for entry in (_attempt(registry, each, name) for each in sorted(kinds)) if entry is not None]
    if len(found) == 1:
        return found[0]
    if found:
        raise PluginError(
            f"'{name}' is a name of several kinds: add --kind {' or --kind '.join(e.kind for e in found)}"
        )
    if len(kinds) == 1:
        return registry.find(kinds.pop(), name)
    if ":" in name:
        return None
    known = sorted({entry.name for entry in registry.metadata.entries if entry.kind in KINDS})
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean '{nearest[0]}'?" if nearest else ""
    raise PluginError(f"there is no plugin '{name}'.{hint} Known: {', '.join(known)}")


def _attempt(registry: Registry, kind: str, name: str) -> Entry | None:
    try:
        entry = registry.find(kind, name)
    except PluginError:
        return None
    return entry if entry.distribution is not None else None
