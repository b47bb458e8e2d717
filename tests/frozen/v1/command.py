"""Greets."""

import typer

from dovetail.contracts.command import Command
from dovetail.contracts.errors import ConfigError


class Frozen(Command):
    """Greet somebody."""

    contract = (1, 0)
    stability = "stable"

    def app(self) -> typer.Typer:
        app = typer.Typer()

        @app.command()
        def frozen(name: str) -> None:
            if name == "nobody":
                raise ConfigError("nobody cannot be greeted")
            print(f"hello {name}")

        return app
