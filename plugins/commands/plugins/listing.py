"""`dovetail plugins list`."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.table import Table

from dovetail.commands import create_console, print_warning
from dovetail.commands.installed import HOOKS_KIND, Entry, Registry, written_text
from dovetail.plugins.commands.plugins.cells import cells
from dovetail.plugins.commands.plugins.lookup import KindOption, require_kind


def list_plugins(
    kind: KindOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List installed plugins from their metadata, without importing any, by the names that a config writes."""
    registry = Registry.scan()
    require_kind(kind)
    entries = [entry for entry in registry.metadata.entries if kind in (None, entry.kind)]
    if as_json:
        facts = [
            {**dataclasses.asdict(entry), "write": _name(registry, entry), "stability": _stability(entry)}
            for entry in entries
        ]
        typer.echo(json.dumps(facts, indent=2))
        return
    table = Table("kind", "name", "distribution", "contract", "stability", "reference")
    for entry in entries:
        contract = f"v{entry.major}" if entry.refusal is None else f"v{entry.major} (refused)"
        stability = _stability(entry) or ""
        table.add_row(*cells(entry.kind, _name(registry, entry), entry.origin, contract, stability, entry.reference))
    create_console().print(table)
    for entry in entries:
        if entry.refusal is not None:
            print_warning(f"{entry.label}: {entry.refusal}")
    for warning in registry.metadata.warnings:
        print_warning(warning)


def _name(registry: Registry, entry: Entry) -> str:
    """What a config writes: of a name that Dovetail's own plugin has, or several, "dist:name"."""
    return entry.name if entry.kind == HOOKS_KIND else registry.name_of(entry)


def _stability(entry: Entry) -> str | None:
    """As its source has it; None for hooks, which have none, and where there is no source."""
    return written_text(entry.reference, "stability") if entry.kind != HOOKS_KIND else None
