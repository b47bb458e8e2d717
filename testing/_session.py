"""A pytest session of its own in this process, over one class of tests."""

from __future__ import annotations

import os
from collections.abc import Collection, Generator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar

import pytest

from dovetail.testing._watch import Journal, Watch
from dovetail.testing.capabilities import UNDECLARED, Capability

_QUIET = (
    *("terminal", "cacheprovider", "faulthandler", "timeout", "xdist", "hypothesispytest", "capture"),
    *("unraisableexception", "threadexception"),
)
"""What a session sets up for itself in a process (capture, timers, fault handlers, hooks) an outer one may have set up
already; two of those hooks would also collect the garbage of the whole process at every end."""

_MODULE = "dovetail_suite"
"""Name of the module that the tested class is of."""
S = TypeVar("S")


@dataclass(frozen=True)
class Result:
    """How one case of a test ended."""

    name: str
    """Of the test, with its parameters in brackets."""
    outcome: Literal["passed", "failed", "skipped", "quirk"]
    """A quirk: it failed as the suite's `quirks` say."""
    seconds: float
    text: str
    """What pytest prints of a failure; why a test was skipped, or has a quirk; else empty."""
    undeclared: Capability | None = None
    """The capability for whose lack it was skipped."""


def run_class(
    suite: type,
    attributes: Mapping[str, Any],
    test: str | None = None,
    *,
    cases: Collection[str] | None = None,
    watch: Watch | None = None,
    journal: Journal | None = None,
) -> list[Result]:
    """Runs the tests of a subclass of `suite` with these attributes.

    Args:
        suite: Class of tests.
        attributes: Set on the subclass.
        test: Runs this test alone, with parameters in brackets one case of it, up to its first failure.
        cases: Runs these cases alone.
        watch: Watches over each case.
        journal: Gets the names of all cases (`cases`) before the first runs, then each result.

    Raises:
        ValueError: There is no such test, or pytest could not collect any.
    """
    name = f"Test{suite.__name__}"
    module = ModuleType(_MODULE)
    vars(module)[name] = subclass(suite, attributes, name)
    session = _Session(module, cases, watch or Watch(None, 0), journal or Journal(None))
    here = Path(__file__)
    options = [argument for plugin in _QUIET for argument in ("-p", f"no:{plugin}")]
    options += ["--noconftest", "-c", os.devnull, f"--rootdir={here.parent}", "--import-mode=importlib"]
    only = [] if test is None else ["-x"]
    selected = f"{here}::{name}" if test is None else f"{here}::{name}::{test}"
    code = pytest.main([*options, *only, selected], plugins=[session])
    if code == pytest.ExitCode.INTERRUPTED and not session.errors:
        raise KeyboardInterrupt  # pytest takes it for its own
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        asked = "no test can be collected" if test is None else f"there is no test {test}"
        raise ValueError(f"{suite.__name__}: {asked}: {' '.join(session.errors) or repr(code)}")
    return session.results


def subclass(suite: type[S], attributes: Mapping[str, Any], name: str) -> type[S]:
    """A subclass of a suite with attributes, as an author's test file has it."""
    return type(name, (suite,), {"__module__": _MODULE, **attributes})


class _Module(pytest.Module):
    """A module without a file."""

    content: ModuleType

    def _getobj(self) -> ModuleType:
        return self.content


class _Session:
    """A plugin of pytest that collects one module and keeps what its tests report."""

    def __init__(self, module: ModuleType, cases: Collection[str] | None, watch: Watch, journal: Journal):
        self._module = module
        self._cases = cases
        self._watch = watch
        self._journal = journal
        self.results: list[Result] = []
        self.errors: list[str] = []

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> _Module | None:
        if file_path.name != Path(__file__).name:
            return None
        collected: _Module = _Module.from_parent(parent, path=file_path)
        collected.content = self._module
        return collected

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors.append(report.longreprtext)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._cases is not None:
            items[:] = [item for item in items if item.name in self._cases]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        with self._watch.task(item.name):
            return (yield)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._journal.write({"cases": [item.name for item in session.items]})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (result := _result(report)) is not None:
            self.results.append(result)
            self._journal.write(asdict(result))


def _result(report: pytest.TestReport) -> Result | None:
    """Of a phase of a case; None for one after which the case goes on."""
    name = report.nodeid.rpartition("::")[2]
    if report.skipped and hasattr(report, "wasxfail"):
        return Result(name, "quirk", report.duration, str(report.wasxfail))
    if report.failed:
        return Result(name, "failed", report.duration, report.longreprtext)
    if report.skipped:
        return Result(name, "skipped", report.duration, _reason(report), _undeclared(report))
    return Result(name, "passed", report.duration, "") if report.when == "call" else None


def _reason(report: pytest.TestReport) -> str:
    """Why a test was skipped."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return report.longreprtext


def _undeclared(report: pytest.TestReport) -> Capability | None:
    """The capability for whose lack a test was skipped."""
    return next((Capability(*value) for key, value in report.user_properties if key == UNDECLARED), None)  # type: ignore[misc]
