"""The bundled commands under their suite."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from dovetail.plugins.commands.config import ConfigCommand
from dovetail.plugins.commands.plugins import PluginsCommand
from dovetail.testing.command_suite import CommandSuite


class TestPlugins(CommandSuite):
    plugin = PluginsCommand
    works = (["list"], ["list", "--kind", "scheduler", "--json"], ["info", "fcfs"])
    refused = ([], ["list", "--kind", "no-such-kind"], ["info", "no-such-plugin"])


class TestConfig(CommandSuite):
    plugin = ConfigCommand
    works = (["schema"],)
    refused = (["no-such-command"],)


class TestEveryCommand(CommandSuite):
    """Help is all that every command can do in a moment."""

    plugin = PluginsCommand  # the first; the fixture sets each in turn
    works = (["--help"],)

    @pytest.fixture(autouse=True, params=sorted(entry.name for entry in entry_points(group="dovetail.command.v1")))
    @classmethod
    def _command(cls, request: pytest.FixtureRequest) -> None:
        (entry,) = entry_points(group="dovetail.command.v1", name=request.param)
        cls.plugin = entry.load()

    @pytest.mark.nightly
    def test_help_loads_no_model_code(self) -> None:
        super().test_help_loads_no_model_code()

    def test_refuses_unknown_options(self) -> None:
        result = self.run(["--no-such-option"])
        assert result.exit_code == 2
        assert "--no-such-option" in result.output
