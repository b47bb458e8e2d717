"""`dovetail plugins doctor`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from dovetail.commands import create_console, print_warning
from dovetail.commands.installed import Finding, Registry, diagnose
from dovetail.plugins.commands.plugins.cells import cells


def examine_plugins(
    references: Annotated[
        list[str] | None, typer.Argument(help="Also examine these: ./file.py:Class or package.module:Class.")
    ] = None,
) -> None:
    """Load every plugin separately and report broken ones. The exit code is 1 if there are any."""
    diagnosis = diagnose(Registry.scan(), references or [])
    table = Table("kind", "name", "distribution", "status")
    for finding in diagnosis.findings:
        entry = finding.entry
        table.add_row(*cells(entry.kind, entry.name, entry.origin, _status(finding)))
    create_console().print(table)
    for warning in diagnosis.warnings:
        print_warning(warning)
    for finding in diagnosis.broken:
        print_warning(str(finding.problem))
    if diagnosis.broken:
        raise typer.Exit(1)


def _status(finding: Finding) -> str:
    if finding.problem is None:
        return "ok"
    return f"broken: {finding.problem.splitlines()[0].removeprefix(finding.entry.label).removeprefix(':').strip()}"
