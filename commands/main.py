"""The command `dovetail`: a group that finds its commands among the plugins and imports one when it is called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, cast

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from dovetail import __version__
from dovetail.commands.activity import show_in_terminal
from dovetail.commands.arguments import as_click_takes_them
from dovetail.commands.errors import print_error
from dovetail.commands.summary import docstring_summary
from dovetail.contracts.command import Command
from dovetail.contracts.errors import DovetailError, PluginError
from dovetail.registry.entries import Entry
from dovetail.registry.registry import Registry

_PANEL_OF_OTHERS = "Commands of other distributions"


class LazyGroup(TyperGroup):
    """A group whose listed commands are placeholders; the real one is imported when its name is resolved."""

    def __init__(self, **attributes: Any):
        super().__init__(**attributes)
        self._loaders: dict[str, Callable[[], typer.Typer]] = {}
        self._summaries: dict[str, Callable[[], str]] = {}

    def add_lazy(
        self, name: str, summary: Callable[[], str], load: Callable[[], typer.Typer], panel: str | None = None
    ) -> None:
        """Adds a command by its name, without importing it."""
        self.commands[name] = TyperCommand(name=name, rich_help_panel=panel)
        self._loaders[name] = load
        self._summaries[name] = summary

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """As the base class; reads the sources of commands for their summaries."""
        for name, summary in self._summaries.items():
            self.commands[name].help = summary()
        super().format_help(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """As the base class, with the real command instead of the placeholder, and arguments as click takes them."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and name in self._loaders:
            command = typer.main.get_command(self._loaders[name]())
            rest = as_click_takes_them(command, rest)
        return name, command, rest


@dataclass
class Switches:
    """Options of `dovetail` itself that are used after the command's context ended."""

    show_traceback: bool = False


def create_group(registry: Registry, switches: Switches) -> LazyGroup:
    """Returns the command line with the commands of installed plugins, Dovetail's own included."""
    root = typer.Typer(
        cls=LazyGroup,
        no_args_is_help=True,
        rich_markup_mode="rich",
        context_settings={"token_normalize_func": _with_dashes},
    )

    @root.callback()
    def dovetail(
        version: Annotated[
            bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
        ] = False,
        show_traceback: Annotated[
            bool, typer.Option("--traceback", help="Print the traceback of an error as well.")
        ] = False,
    ) -> None:
        """LLM inference and serving, made of plugins."""
        switches.show_traceback = show_traceback

    group = cast(LazyGroup, typer.main.get_command(root))
    _add_commands(group, registry)
    return group


def main() -> None:
    """Entry point of the console script. A `DovetailError` is printed as one message and sets the exit code."""
    switches = Switches()
    show_in_terminal()
    try:
        create_group(Registry.scan(), switches).main(prog_name="dovetail")
    except DovetailError as error:
        sys.exit(print_error(error, show_traceback=switches.show_traceback))


def _with_dashes(token: str) -> str:
    """Replaces underscores of flags by dashes, so that --max_model_len works."""
    return token.replace("_", "-")


def _add_commands(group: LazyGroup, registry: Registry) -> None:
    entries = registry.entries("command")
    for entry in entries:
        panel = None if entry.is_own else _PANEL_OF_OTHERS
        group.add_lazy(
            registry.name_of(entry), partial(_summary, entry), _loader(registry, entry.qualified_name), panel
        )


def _summary(entry: Entry) -> str:
    text = docstring_summary(entry.reference) or "A command"
    return text if entry.is_own else f"{text} ({entry.origin})"


def _loader(registry: Registry, name: str) -> Callable[[], typer.Typer]:
    def load() -> typer.Typer:
        app = cast(Command, registry.load("command", name)()).app()
        if not isinstance(app, typer.Typer):
            raise PluginError(f"command '{name}': app() returned {type(app).__name__}, not a typer.Typer")
        return app

    return load


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dovetail {__version__}")
        raise typer.Exit
