"""Command: a command of the CLI. Listed from metadata, imported when it is called."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from dovetail.contracts.plugin import Plugin

if TYPE_CHECKING:
    import typer


class Command(Plugin):
    """`dovetail NAME ...`, NAME being the entry point's."""

    @abstractmethod
    def app(self) -> typer.Typer:
        """The command and its options. Errors of Dovetail's own (`DovetailError`) that escape from it are printed as
        one message, with exit code 2 for `ConfigError` and 1 for all others."""
