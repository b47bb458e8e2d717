"""Conformance suite of commands. A third party's test is a subclass::

    from dovetail.testing import CommandSuite

    class TestMyCommand(CommandSuite):
        plugin = MyCommand
        works = (["world"], ["world", "--loud"])
        refused = ([], ["nobody"])

Commands run in this process, as the CLI runs them, with their output to a pipe.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import typer
import typer.main
from typer.testing import CliRunner

from dovetail.contracts.command import Command
from dovetail.contracts.errors import DovetailError
from dovetail.testing._checks import check_light_import, leaves_process_alone
from dovetail.testing.suite import PluginSuite

USAGE = 2
"""Exit code of what is used wrongly."""


class CommandSuite(PluginSuite):
    """Tests of every command."""

    kind: ClassVar[str] = "command"
    plugin: ClassVar[type[Command]]
    works: ClassVar[Sequence[Sequence[str]]]
    """Lists of arguments with which the command succeeds in a moment."""
    refused: ClassVar[Sequence[Sequence[str]]] = ()
    """Lists of arguments that it refuses."""

    @pytest.fixture(autouse=True)
    def _elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What a command writes by a relative path is gone after the test."""
        monkeypatch.chdir(tmp_path)

    def run(self, arguments: Sequence[str], columns: int = 80) -> Any:
        """What `dovetail NAME ARGUMENTS` does, as click's `Result`."""
        runner = CliRunner(env={"COLUMNS": str(columns), "NO_COLOR": None, "FORCE_COLOR": None})
        return runner.invoke(self.plugin().app(), list(arguments))

    def test_says_what_it_does(self) -> None:
        """`dovetail --help` lists the docstring's first line, from metadata."""
        text = inspect.cleandoc(self.plugin.__doc__ or "")
        assert text, "the class has no docstring"
        assert len(text.splitlines()[0]) <= 100, "the first line of the docstring is longer than a line of help"

    def test_makes_an_application(self, capsys: pytest.CaptureFixture[str]) -> None:
        """As often as it is asked, without output."""
        for _ in range(2):
            assert isinstance(self.plugin().app(), typer.Typer)
        captured = capsys.readouterr()
        assert captured.out + captured.err == "", "something is printed before the command runs"

    @pytest.mark.parametrize("columns", [40, 80, 200])
    def test_shows_help(self, columns: int) -> None:
        """On any width."""
        result = self.run(["--help"], columns)
        assert result.exit_code == 0, result.output
        assert "Usage" in result.output

    def test_help_loads_no_model_code(self) -> None:
        """A user who looks for an option does not wait for torch."""
        name = self.plugin.__qualname__
        check_light_import(self.plugin.__module__, f"getattr(module, {name!r})().app()")

    def test_describes_every_option(self) -> None:
        """Help without a word about an option helps nobody."""
        waiting: list[Any] = [typer.main.get_command(self.plugin().app())]
        bare: list[str] = []
        for command in waiting:
            waiting += list(vars(command).get("commands", {}).values())
            options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
            bare += [option.opts[0] for option in options if not (option.help or option.hidden)]
        assert not bare, f"options without help: {', '.join(bare)}"

    def test_refuses_unknown_options(self) -> None:
        """With the code of wrong usage and the option's name."""
        result = self.run([*self.works[0], "--no-such-option"])
        assert result.exit_code == USAGE
        assert "--no-such-option" in result.output

    def test_works(self) -> None:
        """Without a terminal, and with nothing to read; twice, for a process may run it again."""
        for arguments in [*self.works, *self.works]:
            result = self.run(arguments)
            assert result.exit_code == 0, f"{list(arguments)}: {result.output}{result.exception!r}"

    def test_prints_no_control_codes_to_a_pipe(self) -> None:
        """A file or another program reads them as text."""
        for arguments in self.works:
            assert "\x1b" not in self.run(arguments).output, f"{list(arguments)} prints escape sequences"

    def test_refuses(self) -> None:
        """By a `DovetailError` that says why, or by click's usage error; never by a traceback or in silence."""
        if not self.refused:
            pytest.skip(f"{self.plugin.__name__}: the test names nothing that is refused")
        for arguments in self.refused:
            result = self.run(arguments)
            assert result.exit_code != 0, f"{list(arguments)} succeeded"
            if isinstance(result.exception, SystemExit):
                assert result.output.strip(), f"{list(arguments)} is refused without a word"
            else:
                assert isinstance(result.exception, DovetailError), f"{list(arguments)} raised {result.exception!r}"
                assert str(result.exception).strip()

    def test_works_after_a_refusal(self) -> None:
        """Nothing is left of a run that failed."""
        for arguments in self.refused:
            self.run(arguments)
            assert self.run(self.works[0]).exit_code == 0

    def test_leaves_the_process_alone(self) -> None:
        """Working directory, environment and import path."""
        for arguments in [*self.works, *self.refused]:
            with leaves_process_alone():
                self.run(arguments)
