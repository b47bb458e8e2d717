"""`dovetail plugins test`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from dovetail.commands.installed import HOOKS_KIND, Registry
from dovetail.contracts.errors import PluginError
from dovetail.plugins.commands.plugins.lookup import KindOption, find_entry, require_kind


def run_suite(
    name: Annotated[str, typer.Argument(help="A name, dist:name, ./file.py:Class or package.module:Class.")],
    kind: KindOption = None,
    attributes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="An attribute of the suite, such as tolerance=0.01."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the report to this file, as JSON.")] = None,
) -> None:
    """Run the conformance suite of the plugin's kind. The exit code is 1 if a test fails."""
    if importlib.util.find_spec("pytest") is None:
        raise PluginError("the suites need pytest: pip install 'dovetail[testing]'")
    if kind == HOOKS_KIND:
        tested, of_kind = name, HOOKS_KIND
    else:
        require_kind(kind)
        entry = find_entry(Registry.scan(), name, kind)
        tested, of_kind = entry.qualified_name if entry.distribution else entry.reference, entry.kind
    # A process of its own: what a plugin breaks, and where it hangs, ends with it.
    command = [sys.executable, "-m", "dovetail.testing.conformance", tested, "--kind", of_kind]
    command += [part for each in attributes or [] for part in ("--set", each)]
    command += ["--out", str(out)] if out is not None else []
    if code := subprocess.run(command, check=False).returncode:
        raise typer.Exit(code)
