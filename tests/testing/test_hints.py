"""What a plugin does not declare, and could."""

from __future__ import annotations

import sys
from typing import ClassVar

import pytest

from dovetail.contracts.speculation import DraftCapabilities, DraftWorker
from dovetail.testing._session import Result, run_class
from dovetail.testing.capabilities import Capability
from dovetail.testing.hints import Hint, find_hints, lacking, try_capability
from dovetail.testing.suite import PluginSuite

TREES, RANKS = Capability("trees"), Capability("tensor_parallel", 4)


class Modest(DraftWorker):
    contract = (1, 0)
    capabilities = DraftCapabilities(tensor_parallel=2)


class ToySuite(PluginSuite):
    kind: ClassVar[str] = "draft_worker"
    plugin: ClassVar[type[DraftWorker]] = Modest

    def test_trees(self) -> None:
        self.require("trees")

    def test_trees_with_confidence(self) -> None:
        self.require("trees", "confidence")

    def test_confidence(self) -> None:
        self.require("confidence")
        pytest.fail("it has none")

    def test_two_ranks(self) -> None:
        self.require(tensor_parallel=2)

    def test_four_ranks(self) -> None:
        self.require(tensor_parallel=4)

    def test_elsewhere(self) -> None:
        pytest.skip("no such device")


@pytest.fixture
def results() -> list[Result]:
    return run_class(ToySuite, {})


def test_tests_are_skipped_by_the_name_of_what_is_not_declared(results: list[Result]) -> None:
    reasons = {result.name: result.text for result in results if result.outcome == "skipped"}
    assert reasons["test_trees"] == "Modest does not declare trees"
    assert reasons["test_four_ranks"] == "Modest does not declare tensor_parallel 4"
    assert "test_two_ranks" not in reasons
    assert lacking(results) == {
        TREES: ["test_trees", "test_trees_with_confidence"],
        Capability("confidence"): ["test_confidence"],
        RANKS: ["test_four_ranks"],
    }


def test_a_capability_whose_tests_pass_could_be_declared() -> None:
    attributes = {"plugin": Modest}
    assert try_capability(ToySuite, attributes, RANKS, ["test_four_ranks"]) == Hint(str(RANKS), ("test_four_ranks",))
    trees = try_capability(ToySuite, attributes, TREES, ["test_trees", "test_trees_with_confidence"])
    assert trees == Hint("trees", ("test_trees",))
    assert str(trees) == "trees could be declared: 1 tests pass with it"


@pytest.mark.parametrize("case", ["test_confidence", "test_trees_with_confidence"])
def test_one_whose_tests_fail_or_lack_another_could_not(case: str) -> None:
    assert try_capability(ToySuite, {"plugin": Modest}, Capability("confidence"), [case]) is None


def test_members_are_added_to_sets() -> None:
    from dovetail.attention_backends.reference import ReferenceBackend

    float64 = Capability("dtypes", "float64")
    added = Capability("head_sizes", "7")
    assert added.is_declared_by(ReferenceBackend), "None declares all"
    if not float64.is_declared_by(ReferenceBackend):
        more = float64.added_to(ReferenceBackend)
        assert more.capabilities.dtypes == ReferenceBackend.capabilities.dtypes | {"float64"}


PROCESS = """
import json, os, sys, threading
for asked in json.load(sys.stdin):
    name = asked["capability"]["name"]
    if name == "crashes":
        os._exit(9)
    if name == "hangs":
        threading.Event().wait()
    hint = {"capability": name, "tests": asked["cases"]} if name.startswith("works") else None
    print("said by a plugin")
    print("dovetail-hint " + json.dumps(hint), flush=True)
"""


def test_a_crash_and_a_hang_cost_their_own_capability_alone() -> None:
    names = ["works", "crashes", "fails", "hangs", "works_too", "crashes"]
    wanted = {Capability(name, place): [f"test_{name}"] for place, name in enumerate(names)}
    hints = find_hints([sys.executable, "-c", PROCESS], wanted, timeout_s=5)
    assert [str(hint.capability) for hint in hints] == ["works", "works_too"]
    assert hints[0].tests == ("test_works",)
