"""What the suite of commands finds: each a change in a command that passes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
import typer

from dovetail.contracts.command import Command
from dovetail.contracts.errors import ConfigError
from dovetail.testing.command_suite import CommandSuite
from dovetail.testing.faults import Fault, check_fault


class Greets(Command):
    """Greet somebody."""

    contract = (1, 0)

    def greet(self, name: str, loud: bool) -> None:
        if name == "nobody":
            raise ConfigError("nobody cannot be greeted: give a name")
        typer.echo(f"HELLO {name}" if loud else f"hello {name}")

    def app(self) -> typer.Typer:
        app = typer.Typer()

        @app.command()
        def greets(name: str, loud: Annotated[bool, typer.Option(help="In capital letters.")] = False) -> None:
            self.greet(name, loud)

        return app


class GreetSuite(CommandSuite):
    plugin = Greets
    works = (["world"], ["world", "--loud"])
    refused = ([], ["nobody"], ["world", "twice"])


class TestGreets(GreetSuite):
    pass


class Undescribed(Greets):
    pass


Undescribed.__doc__ = None


class Shouts(Greets):
    """Greets."""

    def app(self) -> typer.Typer:
        print("greets 1.0, the best command")
        return super().app()


class GivesAFunction(Greets):
    """Greets."""

    def app(self) -> Any:
        return self.greet


class WithoutHelp(Greets):
    """Greets."""

    def app(self) -> typer.Typer:
        app = typer.Typer()

        @app.command()
        def greets(name: str, loud: bool = False) -> None:
            self.greet(name, loud)

        return app


class NoHelpOption(Greets):
    """Greets."""

    def app(self) -> typer.Typer:
        app = typer.Typer(add_help_option=False)

        @app.command(add_help_option=False)
        def greets(name: str, loud: Annotated[bool, typer.Option(help="In capital letters.")] = False) -> None:
            self.greet(name, loud)

        return app


class TakesAnyOption(Greets):
    """Greets."""

    def app(self) -> typer.Typer:
        app = typer.Typer()

        @app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
        def greets(name: str, loud: Annotated[bool, typer.Option(help="In capital letters.")] = False) -> None:
            self.greet(name, loud)

        return app


class Colours(Greets):
    """Greets."""

    def greet(self, name: str, loud: bool) -> None:
        super().greet(name, loud)
        sys.stdout.write("\x1b[32mdone\x1b[0m\n")


class BareError(Greets):
    """Greets."""

    def greet(self, name: str, loud: bool) -> None:
        if name == "nobody":
            raise KeyError(name)
        super().greet(name, loud)


class SilentRefusal(Greets):
    """Greets."""

    def greet(self, name: str, loud: bool) -> None:
        if name == "nobody":
            raise typer.Exit(1)
        super().greet(name, loud)


class RefusesInWordsOnly(Greets):
    """Greets."""

    def greet(self, name: str, loud: bool) -> None:
        typer.echo(f"hello {name}" if name != "nobody" else "error: nobody")


class Once(Greets):
    """Greets."""

    count: ClassVar[int] = 0

    def greet(self, name: str, loud: bool) -> None:
        type(self).count += 1
        if self.count > 3:
            raise ConfigError("greeted already")
        super().greet(name, loud)


class BreaksAfterARefusal(Greets):
    """Greets."""

    is_broken: ClassVar[bool] = False

    def greet(self, name: str, loud: bool) -> None:
        type(self).is_broken |= name == "nobody"
        if self.is_broken:
            raise ConfigError("nobody was greeted: give a name")
        super().greet(name, loud)


class ReadsStandardInput(Greets):
    """Greets."""

    def greet(self, name: str, loud: bool) -> None:
        super().greet(typer.prompt("Who are you?"), loud)


class LeavesADirectory(Greets):
    """Greets."""

    def greet(self, name: str, loud: bool) -> None:
        os.chdir(Path.cwd().parent)
        super().greet(name, loud)


class SetsVariables(Greets):
    """Greets."""

    def greet(self, name: str, loud: bool) -> None:
        os.environ["GREETED"] = name
        super().greet(name, loud)


FAULTS = [
    Fault("does not say what it does", Undescribed, "test_says_what_it_does"),
    Fault("prints before it runs", Shouts, "test_makes_an_application"),
    Fault("makes no application", GivesAFunction, "test_makes_an_application"),
    Fault("has no help", NoHelpOption, "test_shows_help"),
    Fault("describes no options", WithoutHelp, "test_describes_every_option"),
    Fault("takes any option", TakesAnyOption, "test_refuses_unknown_options"),
    Fault("prints colours to a pipe", Colours, "test_prints_no_control_codes_to_a_pipe"),
    Fault("raises errors of its own", BareError, "test_refuses"),
    Fault("refuses in silence", SilentRefusal, "test_refuses"),
    Fault("refuses with the code of success", RefusesInWordsOnly, "test_refuses"),
    Fault("works once", Once, "test_works"),
    Fault("breaks after a refusal", BreaksAfterARefusal, "test_works_after_a_refusal"),
    Fault("waits for an answer", ReadsStandardInput, "test_works"),
    Fault("changes the working directory", LeavesADirectory, "test_leaves_the_process_alone"),
    Fault("sets variables of the environment", SetsVariables, "test_leaves_the_process_alone"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_finds_a_command_that(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREETED", "")
    check_fault(fault, GreetSuite, plugin=fault.plugin)


def test_the_suite_finds_a_command_that_loads_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "heavy_greeting.py").write_text("import torch\nfrom tests.testing.test_command_faults import Greets\n")
    monkeypatch.syspath_prepend(tmp_path)
    import heavy_greeting

    heavy = type("Greets", (Greets,), {"__module__": heavy_greeting.__name__})
    check_fault(Fault("loads torch", heavy, "test_help_loads_no_model_code"), GreetSuite, plugin=heavy)
