"""The command `batch`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from dovetail.contracts.command import Command

if TYPE_CHECKING:
    import typer


class BatchCommand(Command):
    """Answer a file of requests in OpenAI's batch format."""

    contract: ClassVar[tuple[int, int]] = (1, 0)

    def app(self) -> typer.Typer:
        """The subcommands; what they need besides their options is imported when one is called."""
        from dovetail.plugins.commands.batch.cli import app

        return app
