"""Asks at a terminal for what the arguments do not say."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.prompt import Prompt
from rich.table import Table

from dovetail.commands import print_warning
from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.plugins.commands.plugins.cells import cells
from dovetail.plugins.commands.plugins.new.names import (
    SUMMARIES,
    check_free,
    checked_author,
    checked_kind,
    checked_names,
    spelled_names,
)
from dovetail.plugins.commands.plugins.new.project import check_folder
from dovetail.plugins.commands.plugins.new.templates import load_template, offered

_NO_START = "none"


@dataclass(frozen=True)
class Answers:
    """What the command needs, complete."""

    name: str
    kind: str
    start: str | None
    """The plugin whose public base to start from; None: the kind's own template."""
    author: str
    folder: Path


def ask(
    console: Console, name: str | None, kind: str | None, start: str | None, author: str | None, folder: Path | None
) -> Answers:
    """Asks for each that is None, again where the answer cannot be used. Raises `ConfigError` for arguments that
    cannot, before it asks anything where that is known by then."""
    _check_given(name, author, folder)
    if kind is None:
        console.print(_kinds())
        kind = _until_usable(console, "kind", None, checked_kind)
    chosen = checked_kind(kind)
    if start is not None:
        load_template(chosen, start)
    elif offered(chosen):
        start = _start(console, chosen)
    if name is None:
        name = _until_usable(console, "name of the distribution", None, lambda text: checked_names(text, chosen))
    else:
        checked_names(name, chosen)
    if author is None:
        author = _until_usable(console, "author, as Name <address>", _known_author(), checked_author)
    if folder is None:
        folder = Path(
            _until_usable(console, "folder to make", name, lambda text: check_folder(Path(text).expanduser()))
        )
    return Answers(name.strip(), chosen, start, author, folder)


def _check_given(name: str | None, author: str | None, folder: Path | None) -> None:
    names = spelled_names(name) if name is not None else None
    if author is not None:
        checked_author(author)
    if folder is not None:
        check_folder(folder.expanduser())
    if names is None:
        return
    try:
        check_free(names, None)
    except ConfigError:
        # Its author's, installed in place: then the folder is what to speak of.
        if folder is None:
            check_folder(Path(names.distribution))
        raise


def _kinds() -> Table:
    table = Table("kind", "it answers", "--from")
    for kind, summary in SUMMARIES.items():
        table.add_row(*cells(kind, summary, ", ".join(offered(kind))))
    return table


def _start(console: Console, kind: str) -> str | None:
    """The plugin to start from, of those that offer a template of this kind."""

    def check(text: str) -> None:
        load_template(kind, _as_start(text))

    question = f"start from the public base of ({', '.join(offered(kind))})"
    return _as_start(_until_usable(console, question, _NO_START, check))


def _as_start(text: str) -> str | None:
    return text if text != _NO_START else None


def _until_usable(console: Console, question: str, default: str | None, check: Callable[[str], object]) -> str:
    while True:
        answer = Prompt.ask(question, console=console, default=default or "", show_default=bool(default))
        try:
            check(answer)
        except (ConfigError, PluginError) as error:
            print_warning(str(error))
        else:
            return answer


def _known_author() -> str:
    """The author that git knows, where it can be used, or nothing."""
    if shutil.which("git") is None:
        return ""
    found = [
        subprocess.run(["git", "config", "--get", key], capture_output=True, text=True, check=False).stdout.strip()
        for key in ("user.name", "user.email")
    ]
    name, address = found
    author = f"{name} <{address}>" if name and address else name
    try:
        checked_author(author)
    except ConfigError:
        return ""
    return author
