"""`dovetail plugins doctor`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated

import typer
from packaging.utils import canonicalize_name
from rich.markup import escape
from rich.table import Table

from dovetail.commands import create_console
from dovetail.commands.installed import Diagnosis, Entry, Finding, Registry, diagnose
from dovetail.plugins.commands.plugins.cells import cells

_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}


def examine_plugins(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME | dist | dist:name | ./file.py:Class | package.module:Class]...",
            help="Import and examine these. Without any: metadata and sources of all that is installed, no import.",
        ),
    ] = None,
    examines_all: Annotated[bool, typer.Option("--all", help="Import and examine every installed plugin.")] = False,
    shows_all: Annotated[
        bool, typer.Option("--verbose", help="Show a row for every plugin, not those with findings alone.")
    ] = False,
    is_strict: Annotated[bool, typer.Option("--strict", help="The exit code is 1 for warnings as well.")] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds for the import and the examination of one plugin.")
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find what plugins and their installation get wrong, each with what to do.

    No plugin is imported in this process: those that are named, and with --all every one, are imported in processes of
    their own. Exit code 0: no errors; 1: at least one; 2: the arguments cannot be used.
    """
    diagnosis = diagnose(Registry.scan(), names or [], loads=examines_all, timeout_s=timeout_s)
    if as_json:
        typer.echo(json.dumps(_as_data(diagnosis), indent=2, ensure_ascii=False))
    else:
        _print(diagnosis, imports=bool(names) or examines_all, shows_all=bool(names) or examines_all or shows_all)
    if diagnosis.errors or (is_strict and any(one.severity == "warning" for one in diagnosis.findings)):
        raise typer.Exit(1)


def _as_data(diagnosis: Diagnosis) -> dict[str, object]:
    examined = [
        {"kind": e.kind, "name": e.name, "distribution": e.distribution, "version": e.version, "label": e.label}
        for e in diagnosis.entries
    ]
    return {"examined": examined, "findings": [dataclasses.asdict(one) for one in diagnosis.findings]}


def _print(diagnosis: Diagnosis, *, imports: bool, shows_all: bool) -> None:
    """Prints a table of the plugins, all or those with findings, and every finding. `imports`: whether the plugins
    were imported; without that `ok` would say too much."""
    console = create_console()
    sound = "ok" if imports else "metadata ok"
    status = {entry: ", ".join(_codes(diagnosis, entry)) for entry in diagnosis.entries}
    table = Table("kind", "name", "distribution", "status")
    for entry, codes in status.items():
        if codes or shows_all:
            table.add_row(*cells(entry.kind, entry.name, entry.origin, codes or sound))
    if table.row_count:
        console.print(table)
    if not shows_all:
        _print_counts(status, sound)
    for one in diagnosis.findings:
        _print_finding(one)
    count = {severity: sum(one.severity == severity for one in diagnosis.findings) for severity in _STYLES}
    counts = ", ".join(f"{number} {severity}{'s' * (number != 1)}" for severity, number in count.items() if number)
    how = "" if imports else ", none imported"
    console.print(f"{len(diagnosis.entries)} plugins examined{how}: {counts or 'nothing wrong was found'}.")


def _print_counts(status: Mapping[Entry, str], sound: str) -> None:
    """A line for each distribution."""
    console = create_console()
    for origin in dict.fromkeys(entry.origin for entry in status):
        found = [bool(codes) for entry, codes in status.items() if entry.origin == origin]
        count = f"{len(found)} plugin{'s' * (len(found) != 1)}"
        said = f"{sum(found)} with findings" if any(found) else sound
        console.print(f"{origin}: {count}, {said}", markup=False, highlight=False, soft_wrap=True)


def _print_finding(one: Finding) -> None:
    style = _STYLES[one.severity]
    console = create_console()
    console.print(f"[{style}]{one.severity}[/] {escape(f'[{one.code}] {one.message}')}", soft_wrap=True)
    console.print(f"    {escape(one.remedy)}", soft_wrap=True)


def _codes(diagnosis: Diagnosis, entry: Entry) -> list[str]:
    """The codes of the findings about a plugin, its name or its distribution."""
    about = {entry.label, f"{entry.kind} '{entry.name}'"}
    owner = canonicalize_name(entry.distribution or "")
    found = [
        one.code
        for one in diagnosis.findings
        if not about.isdisjoint((one.subject, *one.others)) or canonicalize_name(one.subject.partition(" ")[0]) == owner
    ]
    return list(dict.fromkeys(found))
