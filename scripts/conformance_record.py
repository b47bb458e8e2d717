"""A pytest plugin that records what the conformance suites find of the bundled plugins.

PYTHONPATH=scripts pytest -p conformance_record --conformance docs/conformance.json [--conformance-kind KIND] tests

It runs the suites of bundled plugins, and no other test: neither those of seeded faults nor those of plugins that only
the tests have. Files that name no suite are not imported. What it finds replaces what the file has of the same plugins;
several classes that test one plugin, with other options say, are counted together.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from dovetail.contracts.kinds import KINDS
from dovetail.testing import VERSION
from dovetail.testing.suite import PluginSuite

PROPERTY = "conformance"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    parser.addoption("--conformance", type=Path, required=True, metavar="FILE", help="where to record")
    parser.addoption(
        "--conformance-kind", action="append", choices=tuple(KINDS), metavar="KIND", help="this kind alone; repeatable"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Starts to listen."""
    recorder = Recorder(config.getoption("--conformance"), config.getoption("--conformance-kind") or tuple(KINDS))
    config.pluginmanager.register(recorder)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Passes over files without a suite, most of the tests: importing them takes longer than many suites."""
    is_test = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    return True if is_test and "Suite" not in collection_path.read_text(encoding="utf-8") else None


class Recorder:
    """Selects the cases of bundled plugins, and counts their outcomes."""

    def __init__(self, file: Path, kinds: Sequence[str]):
        self._file = file
        self._kinds = kinds
        self._names = {
            entry.value: f"{name}:{entry.name}"
            for name in kinds
            for entry in entry_points(group=KINDS[name].group)
            if entry.dist is not None and entry.dist.name == "dovetail"
        }
        self._found: dict[str, Counter[str]] = {}
        self._contracts: dict[str, str] = {}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leaves the cases that are recorded, and those whose plugin a fixture names once they run."""
        kept = [item for item in items if self._is_kept(item)]
        config.hook.pytest_deselected(items=[item for item in items if not self._is_kept(item)])
        items[:] = kept

    def _is_kept(self, item: pytest.Item) -> bool:
        suite = _suite(item)
        if suite is None or suite.kind not in self._kinds:
            return False
        return not _names_plugin(suite) or self._name(suite) is not None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        """Writes into each report whose it is; with several processes, others than the one that counts."""
        report: Any = yield
        suite = _suite(item)
        if suite is not None and (name := self._name(suite)) is not None:
            report.user_properties.append((PROPERTY, [name, ".".join(map(str, suite.plugin.contract))]))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts a case once: where it was called, or where it did not get so far."""
        if report.when == "call" or not report.passed:
            for name, value in report.user_properties:
                if name == PROPERTY and isinstance(value, list):
                    plugin, contract = map(str, value)
                    self._contracts[plugin] = contract
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

    def _name(self, suite: type[PluginSuite]) -> str | None:
        """Kind and name of the bundled plugin that a suite's subclass tests; None for other plugins."""
        if not _names_plugin(suite):
            return None
        return self._names.get(f"{suite.plugin.__module__}:{suite.plugin.__qualname__}")


def _suite(item: pytest.Item) -> type[PluginSuite] | None:
    """The suite's subclass that the test is of."""
    found = item.cls if isinstance(item, pytest.Function) else None
    return found if found is not None and issubclass(found, PluginSuite) else None


def _names_plugin(suite: type[PluginSuite]) -> bool:
    return any("plugin" in vars(each) for each in suite.__mro__)
