"""`dovetail plugins test`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from dovetail.commands.installed import Registry, import_environment, module_command
from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.plugins.commands.plugins.lookup import KindOption, listed_entry, require_kind
from dovetail.plugins.commands.plugins.suite_end import read_end, summary, unfinished_report
from dovetail.plugins.commands.plugins.suite_page import suite_page

NOT_FINISHED = 3
"""Exit code where the suite did not come to its end."""
_SERVE = "serve=dovetail.plugins.server.live:live_server"
"""What serves the routes of a suite."""


def run_suite(
    name: Annotated[str, typer.Argument(help="A name, dist:name, ./file.py:Class or package.module:Class.")],
    kind: KindOption = None,
    attributes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="An attribute of the suite, such as tolerance=0.01."),
    ] = None,
    suite: Annotated[
        str | None, typer.Option("--suite", metavar="NAME", help="Another suite of the kind, such as RouteSuite.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the report to this file, as JSON.")] = None,
    page: Annotated[Path | None, typer.Option("--page", help="Write the report to this file, as HTML.")] = None,
    hints: Annotated[
        bool, typer.Option(help="Try what the plugin does not declare, and say what it could declare.")
    ] = True,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=1, metavar="SECONDS", help="For importing the plugin, and for each test.")
    ] = 300,
) -> None:
    """Run the conformance suite of the plugin's kind.

    The exit code is 0 if all tests pass, 1 if one fails, 2 if the suite cannot run, and 3 if it hangs or dies: the
    report then has what ended before, that case as `hung` or `died`, and the others as `not run`.
    """
    if importlib.util.find_spec("pytest") is None:
        raise ConfigError("the suites need pytest: pip install 'dovetail[testing]'")
    for option, path in (("--out", out), ("--page", page)):
        _require_writable(option, path)
    tested = _tested(name, kind)
    with tempfile.TemporaryDirectory(prefix="dovetail-") as directory:
        folder = Path(directory)
        command = module_command("dovetail.testing.conformance", *tested)
        command += [part for each in attributes or [] for part in ("--set", each)]
        command += ["--default", _SERVE, *([] if suite is None else ["--suite", suite])]
        command += ["--hints" if hints else "--no-hints", "--timeout", str(timeout_s)]
        for option in ("out", "watch", "journal"):
            command += [f"--{option}", str(folder / option)]
        # A process of its own: what a plugin breaks, and where it hangs, ends with it.
        code = subprocess.run(command, env=import_environment(), check=False).returncode
        report = json.loads(written) if (written := _text(folder / "out")) else None
        if unfinished := _text(folder / "watch"):
            end = read_end(unfinished, code, timeout_s)
            report, code = unfinished_report(folder / "journal", end), NOT_FINISHED
            if report is not None:
                typer.echo(summary(report))
            typer.echo(f"error: {end.message}", err=True)
    if report is not None:
        _write(report, out, page)
    if code:
        raise typer.Exit(code)


def _text(path: Path) -> str:
    """Of a file that the process wrote, if it came so far."""
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _write(report: Mapping[str, Any], out: Path | None, page: Path | None) -> None:
    """To the files that were asked for."""
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if page is not None:
        page.write_text(suite_page(report), encoding="utf-8")
    for written in (out, page):
        if written is not None:
            typer.echo(f"report: {written}")


def _require_writable(option: str, path: Path | None) -> None:
    """Refuses a file that could not be written when the suite has run."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder: name a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} {path}: it may not be written")


def _tested(name: str, kind: str | None) -> list[str]:
    """The plugin as the suite's process takes it. Nothing is imported here, as that may hang."""
    try:
        require_kind(kind)
        entry = listed_entry(Registry.scan(), name, kind)
    except PluginError as error:  # exit code 2: nothing was tested
        raise ConfigError(str(error)) from error
    if entry is None:
        return [name] if kind is None else [name, "--kind", kind]
    return [entry.qualified_name if entry.distribution else entry.reference, "--kind", entry.kind]
