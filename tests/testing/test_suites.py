"""What all suites have in common: where they are, and what they refuse before any test runs."""

from __future__ import annotations

import importlib
import re
from types import ModuleType
from typing import Any, ClassVar

import pytest

import dovetail.testing
from dovetail.contracts.kinds import KINDS
from dovetail.plugins.quantization.int8 import Int8Method
from dovetail.registry.loading import base_class
from dovetail.schedulers.fcfs import FCFSScheduler
from dovetail.testing._checks import check_light_import
from dovetail.testing._session import run_class
from dovetail.testing.quirks import Quirk
from dovetail.testing.suite import SUITES, Suite


def refusal(suite: type[Suite], **attributes: Any) -> str:
    """What the first test of a subclass with these attributes says."""
    return type("TestMine", (suite,), attributes).reason_incomplete() or ""


def test_the_package_has_every_public_suite() -> None:
    modules = [each for each in dovetail.testing.__all__ if each != "VERSION"]
    assert all(dovetail.testing.__getattr__(name).__name__ == name for name in modules)
    assert {described.name for described in SUITES.values()} <= set(modules)
    with pytest.raises(AttributeError, match="NoSuchSuite"):
        dovetail.testing.__getattr__("NoSuchSuite")


def test_importing_the_package_loads_no_suite() -> None:
    check_light_import("dovetail.testing", "assert 'pytest' not in sys.modules, 'pytest'")


@pytest.mark.parametrize("kind", KINDS)
def test_a_suite_takes_classes_of_its_kind_alone(kind: str) -> None:
    suite = SUITES[kind].load()
    other = next(each for each in KINDS if each != kind)
    wrong = rf"of kind {other}: use dovetail\.testing\.{SUITES[other].name}$"
    assert not re.search(wrong, refusal(suite, plugin=base_class(kind)))
    assert re.search(wrong, refusal(suite, plugin=base_class(other)))


def test_hooks_are_any_object_that_is_no_other_plugin() -> None:
    suite = SUITES["hooks"].load()
    assert refusal(suite, plugin=ModuleType("my_hooks")) == ""
    assert "FCFSScheduler, which is a plugin of kind scheduler" in refusal(suite, plugin=FCFSScheduler)


def test_what_is_no_plugin_is_told_what_to_derive_from() -> None:
    suite: type[Suite] = importlib.import_module("dovetail.testing").SchedulerSuite
    for found in (dict, FCFSScheduler.__new__):
        assert "derive it from Scheduler of dovetail.contracts.scheduler" in refusal(suite, plugin=found)


@pytest.mark.parametrize("kind", SUITES)
def test_a_class_that_names_no_plugin_is_one_error(kind: str) -> None:
    results = run_class(SUITES[kind].load(), {})
    failed = [result for result in results if result.outcome == "failed"]
    assert {result.outcome for result in results[1:]} == {"skipped"}
    assert len(results) > 5
    assert [result.text.strip() for result in failed] == [
        f"Test{SUITES[kind].name} has no `plugin`: write plugin = ... in the class"
    ]


def test_what_a_suite_needs_besides_is_one_error_too() -> None:
    base = type("Base", (SUITES["quantization"].load(),), {"plugin": Int8Method})
    (failed,) = [result.text for result in run_class(base, {}) if result.outcome == "failed"]
    assert "has no `tolerance`: write tolerance = ... in the class" in failed
    assert base.reason_incomplete() is not None
    assert type("TestInt8", (base,), {"tolerance": 0.01}).reason_incomplete() is None


@pytest.mark.parametrize(
    ("kind", "name", "plugin"),
    [("scheduler", "scheduler_class", FCFSScheduler), ("hooks", "hooks", ModuleType("my_hooks"))],
)
def test_a_plugin_under_an_old_name_is_told_the_new_one(kind: str, name: str, plugin: type | ModuleType) -> None:
    suite = SUITES[kind].load()
    for others in ({}, {"plugin": plugin}):
        reason = refusal(suite, **{name: plugin}, **others)
        assert re.search(rf"sets `{name}`.*write plugin = {plugin.__name__}$", reason)
    assert refusal(suite, plugin=plugin, **{name: pytest.fixture(lambda self: None)}) == ""
    assert refusal(suite, plugin=plugin, family_class="of another kind") == ""


def test_an_error_in_one_class_leaves_the_others_of_its_file_alone() -> None:
    suite = SUITES["scheduler"].load()

    class TestOfAnotherKind(suite):  # type: ignore[misc, valid-type]
        plugin = Int8Method

    class TestRenamed(suite):  # type: ignore[misc, valid-type]
        plugin = FCFSScheduler
        quirks: ClassVar = {"test_of_another_name": Quirk(reason="it had that name", expires="9.0")}

    class TestSound(suite):  # type: ignore[misc, valid-type]
        plugin = FCFSScheduler

    for wrong, reason in ((TestOfAnotherKind, "kind quantization"), (TestRenamed, "no test of that name")):
        first, *others = run_class(wrong, {})
        assert first.outcome == "failed"
        assert reason in first.text
        assert {result.outcome for result in others} == {"skipped"}
    assert run_class(TestSound, {}, "test_one_request_runs_to_its_end")[0].outcome == "passed"


def test_an_interrupt_ends_the_session_around_a_suite() -> None:
    class Interrupted:
        def test_waits(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_class(Interrupted, {})
