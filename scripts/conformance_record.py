"""A pytest plugin that records what the conformance suites find of the bundled plugins.

PYTHONPATH=scripts pytest -p conformance_record --conformance docs/conformance.json tests

Of the tests it leaves those that are a suite's. What it finds replaces what the file has of the same plugins; several
classes that test one plugin, with other options say, are counted together.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from dovetail.contracts.kinds import KINDS
from dovetail.testing import VERSION
from dovetail.testing.suite import Suite

PROPERTY = "conformance"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option."""
    parser.addoption("--conformance", type=Path, required=True, metavar="FILE", help="where to record")


def pytest_configure(config: pytest.Config) -> None:
    """Starts to listen."""
    config.pluginmanager.register(Recorder(config.getoption("--conformance")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests of suites."""
    of_suites = [item for item in items if _suite(item) is not None]
    config.hook.pytest_deselected(items=[item for item in items if _suite(item) is None])
    items[:] = of_suites


class Recorder:
    """Counts the outcomes of each plugin's cases."""

    def __init__(self, file: Path):
        self._file = file
        self._names = {
            entry.value: f"{kind.name}:{entry.name}"
            for kind in KINDS.values()
            for entry in entry_points(group=kind.group)
            if entry.dist is not None and entry.dist.name == "dovetail"
        }
        self._found: dict[str, Counter[str]] = {}
        self._contracts: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        """Writes into each report whose it is; with several processes, others than the one that counts."""
        report: Any = yield
        plugin = getattr(_suite(item), "plugin", None)
        if inspect.isclass(plugin):
            name = self._names.get(f"{plugin.__module__}:{plugin.__qualname__}")
            if name is not None:
                report.user_properties.append((PROPERTY, [name, ".".join(map(str, plugin.contract))]))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts a case once: where it was called, or where it did not get so far."""
        if report.when == "call" or not report.passed:
            for name, value in report.user_properties:
                if name == PROPERTY:
                    plugin, self._contracts[plugin] = value
                    outcome = "quirk" if hasattr(report, "wasxfail") else report.outcome
                    self._found.setdefault(plugin, Counter())[outcome] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Writes the record, in the process that saw all reports."""
        if hasattr(session.config, "workerinput"):
            return
        record = json.loads(self._file.read_text(encoding="utf-8")) if self._file.exists() else {}
        for plugin, counts in self._found.items():
            about = {"contract": self._contracts[plugin], "testing": str(VERSION)}
            record[plugin] = about | {outcome: counts[outcome] for outcome in ("passed", "skipped", "failed", "quirk")}
        self._file.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n", encoding="utf-8")


def _suite(item: pytest.Item) -> type[Suite] | None:
    """The suite's subclass that the test is of."""
    found = getattr(item, "cls", None)
    return found if inspect.isclass(found) and issubclass(found, Suite) else None
