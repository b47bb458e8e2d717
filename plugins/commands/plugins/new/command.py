"""`dovetail plugins new`: its arguments, and what it asks for at a terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dovetail.commands import create_console
from dovetail.contracts.errors import ConfigError


def new_plugin(
    name: Annotated[str | None, typer.Argument(help="The distribution's name: acme-drafter.")] = None,
    kind: Annotated[str | None, typer.Option("--kind", help="The plugin's kind: draft_worker, scheduler, ...")] = None,
    start: Annotated[
        str | None, typer.Option("--from", metavar="PLUGIN", help="Start from this plugin's public base.")
    ] = None,
    author: Annotated[str | None, typer.Option("--author", help='"Name" or "Name <address>".')] = None,
    folder: Annotated[Path | None, typer.Option("--folder", help="The folder to make; NAME where left out.")] = None,
) -> None:
    """Write a distribution with a plugin that works, its tests and its CI. At a terminal it asks what is missing."""
    from dovetail import __version__
    from dovetail.plugins.commands.plugins.new import names, project, templates

    console = create_console()
    if kind is None and start is not None:
        kind = _kind_of_start(start)
    if name is None or kind is None:
        if not (sys.stdin.isatty() and console.is_terminal):
            _refuse_missing(name, kind)
        from dovetail.plugins.commands.plugins.new.asking import ask

        answers = ask(console, name, kind, start, author, folder)
        name, kind, start = answers.name, answers.kind, answers.start
        author, folder = answers.author, answers.folder
    kind = names.checked_kind(kind)
    project_names = names.spelled_names(name)
    target = (folder or Path(project_names.distribution)).expanduser()
    # First: an author whose plugin is installed in place has the name taken by this very folder.
    project.check_folder(target)
    names.check_free(project_names, kind)
    by = names.checked_author(author or "")
    template = templates.load_template(kind, start)
    files = project.render(template, project_names, kind, by, __version__)
    project.write(files, target)
    plugin = project_names.package
    console.print(f"{target}: {kind} '{plugin}', {len(files)} files. {template.summary}.", markup=False)
    console.print("Its tests pass as it is:", markup=False)
    for line in (f"cd {target}", "pip install -e '.[test]'", "pytest", f"dovetail plugins list --kind {kind}"):
        console.print(f"    {line}", markup=False)
    starts = templates.offered(kind) if start is None else []
    if starts:
        hint = " or ".join(f"--from {each}" for each in starts)
        console.print(f"To start from the public base of another plugin: {hint}", markup=False, soft_wrap=True)


def _kind_of_start(start: str) -> str | None:
    from dovetail.plugins.commands.plugins.new.templates import kinds_offering

    kinds = kinds_offering(start)
    if len(kinds) > 1:
        raise ConfigError(f"--from {start} is a name of several kinds: add --kind {' or --kind '.join(kinds)}")
    return kinds[0] if kinds else None


def _refuse_missing(name: str | None, kind: str | None) -> None:
    from dovetail.plugins.commands.plugins.new.names import SUMMARIES

    missing = []
    if name is None:
        missing.append("the name of the distribution (dovetail plugins new NAME)")
    if kind is None:
        missing.append(f"--kind, one of {', '.join(SUMMARIES)}")
    raise ConfigError(f"there is no terminal to ask at, and missing is {' and '.join(missing)}")
