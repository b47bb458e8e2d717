"""The command `dovetail`: a group that knows its commands by name and imports one when it is called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, cast

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from dovetail import __version__
from dovetail.activity import show_in_terminal
from dovetail.cli.errors import print_error
from dovetail.contracts.command import Command
from dovetail.contracts.errors import DovetailError, PluginError
from dovetail.registry.registry import Registry
from dovetail.registry.summary import docstring_summary


@dataclass(frozen=True)
class BuiltIn:
    """A command of Dovetail's own."""

    app: str
    """"module:attribute" of a `typer.Typer`."""
    help: str


BUILT_INS = {
    "generate": BuiltIn("dovetail.cli.generate:app", "Complete prompts."),
    "chat": BuiltIn("dovetail.cli.chat:app", "Chat with a model in the terminal."),
    "explain": BuiltIn("dovetail.cli.explain:app", "Say what a config comes to, and why, without loading weights."),
    "config": BuiltIn("dovetail.cli.config:app", "Work with config files and their schema."),
    "plugins": BuiltIn("dovetail.cli.plugins:app", "List, describe and examine plugins."),
}

_PLUGIN_PANEL = "Commands of plugins"


class LazyGroup(TyperGroup):
    """A group whose listed commands are placeholders; the real one is imported when its name is resolved."""

    def __init__(self, **attributes: Any):
        super().__init__(**attributes)
        self._loaders: dict[str, Callable[[], typer.Typer]] = {}

    def add_lazy(self, name: str, help: str, load: Callable[[], typer.Typer], panel: str | None = None) -> None:
        """Adds a command of which only name and help are known yet."""
        self.commands[name] = TyperCommand(name=name, help=help, rich_help_panel=panel)
        self._loaders[name] = load

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """As the base class, with the real command in the placeholder's place."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and name in self._loaders:
            command = typer.main.get_command(self._loaders[name]())
        return name, command, rest


@dataclass
class Switches:
    """Options of `dovetail` itself that outlive the command's context."""

    show_traceback: bool = False


def create_group(registry: Registry, switches: Switches) -> LazyGroup:
    """The command line with the built-in commands and those of installed plugins."""
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
            bool, typer.Option("--traceback", help="Print the traceback of an error, too.")
        ] = False,
    ) -> None:
        """LLM inference and serving, made of plugins."""
        switches.show_traceback = show_traceback

    group = cast(LazyGroup, typer.main.get_command(root))
    for name, command in BUILT_INS.items():
        group.add_lazy(name, command.help, _built_in_loader(command))
    _add_plugin_commands(group, registry)
    return group


def main() -> None:
    """Entry point of the console script. An error of Dovetail's own ends in one message and an exit code."""
    switches = Switches()
    show_in_terminal()
    try:
        create_group(Registry.scan(), switches).main(prog_name="dovetail")
    except DovetailError as error:
        sys.exit(print_error(error, show_traceback=switches.show_traceback))


def _with_dashes(token: str) -> str:
    """Flags may be written with underscores, as keywords are: --max_model_len."""
    return token.replace("_", "-")


def _add_plugin_commands(group: LazyGroup, registry: Registry) -> None:
    entries = registry.entries("command")
    names = [entry.name for entry in entries]
    for entry in entries:
        # A name that is taken, by us or by another distribution, is still reachable as "dist:name".
        taken = entry.name in BUILT_INS or names.count(entry.name) > 1
        name = entry.qualified_name if taken else entry.name
        help = f"{docstring_summary(entry.reference) or 'A command'} ({entry.origin})"
        group.add_lazy(name, help, _plugin_loader(registry, entry.qualified_name), _PLUGIN_PANEL)


def _built_in_loader(command: BuiltIn) -> Callable[[], typer.Typer]:
    def load() -> typer.Typer:
        module, _, attribute = command.app.partition(":")
        app: typer.Typer = vars(importlib.import_module(module))[attribute]
        return app

    return load


def _plugin_loader(registry: Registry, name: str) -> Callable[[], typer.Typer]:
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
