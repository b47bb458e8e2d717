"""`dovetail plugins test`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from dovetail.commands.installed import Registry, import_environment, module_command
from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.plugins.commands.plugins.lookup import KindOption, listed_entry, require_kind
from dovetail.plugins.commands.plugins.suite_page import suite_page

NOT_FINISHED = 3
"""Exit code where the suite did not come to its end."""
_SERVE = "serve=dovetail.plugins.server.live:live_server"
"""What serves the routes of a suite."""
_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')


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

    The exit code is 0 if all tests pass, 1 if one fails, 2 if the suite cannot run, and 3 if it hangs or dies.
    """
    if importlib.util.find_spec("pytest") is None:
        raise ConfigError("the suites need pytest: pip install 'dovetail[testing]'")
    for option, path in (("--out", out), ("--page", page)):
        _require_writable(option, path)
    tested = _tested(name, kind)
    with tempfile.TemporaryDirectory(prefix="dovetail-") as directory:
        watched, report = Path(directory) / "task", out or Path(directory) / "report.json"
        command = module_command("dovetail.testing.conformance", *tested)
        command += [part for each in attributes or [] for part in ("--set", each)]
        command += ["--default", _SERVE, *([] if suite is None else ["--suite", suite])]
        command += ["--hints" if hints else "--no-hints", "--timeout", str(timeout_s)]
        command += ["--out", str(report), "--watch", str(watched)]
        # A process of its own: what a plugin breaks, and where it hangs, ends with it.
        code = subprocess.run(command, env=import_environment(), check=False).returncode
        if unfinished := watched.read_text(encoding="utf-8") if watched.exists() else "":
            typer.echo(f"error: {_describe_end(unfinished, code, timeout_s)}", err=True)
            raise typer.Exit(NOT_FINISHED)
        if page is not None and code in (0, 1):
            page.write_text(suite_page(json.loads(report.read_text(encoding="utf-8"))), encoding="utf-8")
    for written in (out, page) if code in (0, 1) else ():
        if written is not None:
            typer.echo(f"report: {written}")
    if code:
        raise typer.Exit(code)


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


def _describe_end(unfinished: str, code: int, timeout_s: float) -> str:
    """Why a process ended in the middle of a task, from what it left in its file."""
    task, _, stacks = unfinished.partition("\n")
    if not stacks:
        end = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"{task}: the process ended {end}"
    # The main thread is the last, with its innermost call first.
    frames = [_FRAME.search(line) for line in stacks.rpartition("Thread 0x")[2].splitlines()]
    calls = [(frame[1], frame[2], frame[3]) for frame in frames if frame is not None]
    modules = [call for call in calls if call[2] == "<module>"]
    path, line, _ = (modules if task.startswith("importing ") and modules else calls or [("?", "?", "?")])[0]
    return f"{task} did not end in {timeout_s:g} s: it hangs in {path}, line {line} (--timeout sets the limit)"
