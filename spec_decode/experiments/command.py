"""The command `ab`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from dovetail.contracts.command import Command

if TYPE_CHECKING:
    import typer


class ABCommand(Command):
    """Compare speculation methods in one process, with statistics."""

    contract: ClassVar[tuple[int, int]] = (1, 0)

    def app(self) -> typer.Typer:
        """The subcommands; what they need besides their options is imported when one is called."""
        from dovetail.spec_decode.experiments.cli import app

        return app
