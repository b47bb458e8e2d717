"""Seeded faults: each kind has enough of them, and their page is current."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from dovetail.testing import Fault
from dovetail.testing.suite import SUITES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    """The script that writes the page."""
    return load_script("fault_table")


@pytest.fixture(scope="module")
def faults(script: ModuleType) -> dict[str, list[Fault]]:
    """By kind."""
    found: dict[str, list[Fault]] = script.read_faults()
    return found


@pytest.mark.parametrize("kind", SUITES)
def test_a_kind_has_ten_faults_or_more(kind: str, faults: dict[str, list[Fault]]) -> None:
    names = Counter(fault.name for fault in faults[kind])
    assert len(names) >= 10
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("kind", SUITES)
def test_each_is_found_by_a_test_of_the_suite(kind: str, faults: dict[str, list[Fault]]) -> None:
    named = {fault.test.partition("[")[0] for fault in faults[kind]}
    suites = _all_suites(SUITES[kind].load())
    assert {name for name in named if not any(name in dir(suite) for suite in suites)} == set()


def test_the_page_is_current(script: ModuleType, faults: dict[str, list[Fault]]) -> None:
    written = (ROOT / "docs" / "conformance-faults.md").read_text(encoding="utf-8")
    assert written == script.fault_table(faults), "run make docs"


def _all_suites(suite: type) -> list[type]:
    """With those that derive from it."""
    return [suite, *(each for derived in suite.__subclasses__() for each in _all_suites(derived))]
