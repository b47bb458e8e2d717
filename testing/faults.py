"""Faults as data: a plugin that breaks its contract once, and the test of the suite that finds it.

A suite must find faults. A table of `Fault`s and `check_fault` say so of a suite::

    FAULTS = [Fault("takes the first layer's scale for all", FirstScale, "test_one_plan_serves_all_layers")]

    @pytest.mark.parametrize("fault", FAULTS, ids=str)
    def test_the_suite_finds_a_backend_that(fault):
        check_fault(fault, AttentionBackendSuite, plugin=fault.plugin)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dovetail.testing._session import run_class


@dataclass(frozen=True)
class Fault:
    """A fault of a plugin, and the test of the suite that must fail for it."""

    name: str
    plugin: Any
    """The faulty class, which replaces the correct one in the suite."""
    test: str
    """Name of a test of the suite; with parameters in brackets, that case alone."""

    def __str__(self) -> str:
        return self.name


@dataclass
class Outcome:
    """How the cases of one test ended, by their names."""

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """With what pytest prints of them."""
    skipped: list[str] = field(default_factory=list)
    quirks: dict[str, str] = field(default_factory=dict)
    """Failed as the suite's `quirks` say, with the reason."""


def run_test(suite: type, test: str, **attributes: Any) -> Outcome:
    """Runs one test of a suite in a pytest session of its own, in this process.

    Args:
        suite: Class of the suite, or a subclass.
        test: Its name; with parameters in brackets, one case of it.
        attributes: Set on a subclass of the suite first: what a plugin author would write there.

    Raises:
        ValueError: There is no such test.
    """
    outcome = Outcome()
    for result in run_class(suite, attributes, test):
        if result.outcome == "failed":
            outcome.failed[result.name] = result.text
        elif result.outcome == "quirk":
            outcome.quirks[result.name] = result.text
        else:
            (outcome.passed if result.outcome == "passed" else outcome.skipped).append(result.name)
    return outcome


def check_fault(fault: Fault, suite: type, **attributes: Any) -> None:
    """Asserts that the fault's test fails for a suite with these attributes."""
    outcome = run_test(suite, fault.test, **attributes)
    assert outcome.failed, f"{fault.test} lets through a plugin that {fault.name}: {outcome}"


__all__ = ["Fault", "Outcome", "check_fault", "run_test"]
