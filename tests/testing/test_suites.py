"""What all suites have in common: where they are, and what they refuse before any test runs."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

import dovetail.testing
from dovetail.contracts.errors import PluginError
from dovetail.contracts.kinds import KINDS
from dovetail.registry.loading import base_class
from dovetail.schedulers.fcfs import FCFSScheduler
from dovetail.testing._checks import check_light_import
from dovetail.testing.suite import SUITES, Suite


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
    type("Taken", (suite,), {"plugin": base_class(kind)})
    other = next(each for each in KINDS if each != kind)
    with pytest.raises(PluginError, match=rf"of kind {other}: use dovetail\.testing\.{SUITES[other].name}$"):
        type("Refused", (suite,), {"plugin": base_class(other)})


def test_hooks_are_any_object_that_is_no_other_plugin() -> None:
    suite = SUITES["hooks"].load()
    type("Taken", (suite,), {"plugin": ModuleType("my_hooks")})
    with pytest.raises(PluginError, match=r"FCFSScheduler, which is a plugin of kind scheduler"):
        type("Refused", (suite,), {"plugin": FCFSScheduler})


def test_what_is_no_plugin_is_told_what_to_derive_from() -> None:
    suite: type[Suite] = importlib.import_module("dovetail.testing").SchedulerSuite
    for found in (dict, FCFSScheduler.__new__):
        with pytest.raises(PluginError, match=r"derive it from Scheduler of dovetail\.contracts\.scheduler"):
            type("Refused", (suite,), {"plugin": found})
