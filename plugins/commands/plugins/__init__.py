"""`dovetail plugins`: what is installed, what one plugin offers, and whether all of them work."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from dovetail.contracts.command import Command

if TYPE_CHECKING:
    import typer


class PluginsCommand(Command):
    """List, describe, examine, test and write plugins."""

    contract: ClassVar[tuple[int, int]] = (1, 0)

    def app(self) -> typer.Typer:
        """The subcommands, each a module of this package."""
        from dovetail.plugins.commands.plugins.cli import app

        return app
