"""A class answers for what it reaches by name, and for nothing that its neighbours in the file do."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.commands.installed import Diagnosis, diagnose
from dovetail.registry import Registry
from dovetail.testing.local_plugins import write_distribution

PLAIN = """
from dovetail.contracts.speculation import Draft, DraftCapabilities, DraftWorker

class Old(DraftWorker):
    contract = (1, 0)
    capabilities = DraftCapabilities(tensor_parallel=None)

    def propose(self, batch):
        return [None for _ in batch.requests]
"""
DRAFT = "return [{}([1, 2], from_prediction=2) for _ in batch.requests]"
USED = "which came with 1.1"


def codes(diagnosis) -> list[str]:
    return [one.code for one in diagnosis.findings]


NEIGHBOUR = f"""
{PLAIN}
class New(DraftWorker):
    contract = (1, 1)
    capabilities = DraftCapabilities(reads_prediction=True)

    def propose(self, batch):
        from dovetail.engine.core import EngineCore
        {DRAFT.format("Draft")}

def _of_new(new):
    return New
"""


def test_a_newer_class_in_the_same_file_is_nothing_to_an_older_one(examine, tmp_path: Path):
    (tmp_path / "mix.py").write_text(NEIGHBOUR)
    assert codes(examine(f"{tmp_path}/mix.py:Old")) == []
    assert codes(examine(f"{tmp_path}/mix.py:New")) == ["private-import"]


def test_imports_at_the_top_are_everybodys_and_those_of_another_class_are_not(examine, tmp_path: Path):
    points = {"dovetail.draft_worker.v1": {"old": "acme_mix:Old", "new": "acme_mix:New"}}
    source = f"from dovetail.engine import core\n{NEIGHBOUR}"
    write_distribution(tmp_path, "acme", entry_points=points, modules={"acme_mix.py": source})
    diagnosis = examine()
    found = {entry.name: diagnosis.of(entry) for entry in diagnosis.entries if entry.name in ("old", "new")}
    imported = {name: [one.message.partition(" is imported")[0][-40:] for one in each] for name, each in found.items()}
    assert [text.endswith("core from dovetail.engine") for text in imported["old"]] == [True]
    assert len(imported["new"]) == 2
    assert any("EngineCore from dovetail.engine.core" in text for text in imported["new"])


REACHED = {
    "in_its_body": f"{PLAIN}\n    def on_start(self, batch):\n        {DRAFT.format('Draft')}\n",
    "by_a_function": f"{PLAIN}\n    def start(self, batch):\n        _draft(batch)\n\n"
    f"def _draft(batch):\n    {DRAFT.format('Draft')}\n",
    "by_a_function_of_a_function": f"{PLAIN}\n    def start(self, batch):\n        one(batch)\n\n"
    f"def one(batch):\n    return two(batch)\n\ndef two(batch):\n    {DRAFT.format('Draft')}\n",
    "by_a_helper_class": f"{PLAIN}\n    helper = lambda self: Helper()\n\n"
    f"class Helper:\n    def start(self, batch):\n        {DRAFT.format('Draft')}\n",
    "by_a_base": PLAIN.replace("Old(DraftWorker)", "Base(DraftWorker)")
    + f"    def start(self, batch):\n        {DRAFT.format('Draft')}\n\nclass Old(Base): ...\n",
    "as_an_attribute": f"from dovetail.contracts import speculation\n{PLAIN}\n    def start(self, batch):\n"
    f"        {DRAFT.format('speculation.Draft')}\n",
    "by_a_long_path": f"import dovetail.contracts.speculation\n{PLAIN}\n    def start(self, batch):\n"
    f"        {DRAFT.format('dovetail.contracts.speculation.Draft')}\n",
    "by_a_module_with_another_name": f"import dovetail.contracts.speculation as spec\n{PLAIN}\n"
    f"    def start(self, batch):\n        {DRAFT.format('spec.Draft')}\n",
    "by_another_name": f"from dovetail.contracts.speculation import Draft as D\n{PLAIN}\n    def start(self, batch):\n"
    f"        {DRAFT.format('D')}\n",
    "by_an_assigned_name": f"{PLAIN}\n    def start(self, batch):\n        {DRAFT.format('D')}\n\nD = Draft\n",
    "in_the_file_beside": f"from . import beside as near\n{PLAIN}\n    def start(self, batch):\n"
    "        near.draft(batch)\n",
    "by_a_name_of_the_file_beside": f"from .beside import draft as other\n{PLAIN}\n    def start(self, batch):\n"
    "        other(batch)\n",
    "handed_over_by_a_module": f"from dovetail.contracts import speculation\n{PLAIN}\n    def start(self, each):\n"
    "        return isinstance(each, speculation.TopTokens)\n",
    "where_the_class_is_handed_on": "from .handed import Old\n",
}
BESIDE = f"from dovetail.contracts.speculation import Draft\n\ndef draft(batch):\n    {DRAFT.format('Draft')}\n"
HANDED = f"from .beside import *\n{PLAIN}\n    def start(self, batch):\n        draft(batch)\n"


SPARED = {
    "a_class_of_the_same_name": PLAIN.replace("import Draft,", "import")
    + "\n    def start(self, batch):\n        return Draft(from_prediction=2)\n\n"
    "class Draft:\n    def __init__(self, from_prediction): ...\n",
    "a_function_that_only_a_neighbour_calls": f"{PLAIN}\n\nclass New(DraftWorker):\n    contract = (1, 1)\n"
    f"    def propose(self, batch):\n        return late(batch)\n\ndef late(batch):\n    {DRAFT.format('Draft')}\n",
    "a_neighbour_that_it_names": f"{PLAIN}\n    better = lambda self: New\n\nclass New(DraftWorker):\n"
    f"    contract = (1, 1)\n    def propose(self, batch):\n        {DRAFT.format('Draft')}\n",
}


@pytest.fixture(scope="module")
def diagnosis(tmp_path_factory) -> Diagnosis:
    """Of all of these in one distribution."""
    site = tmp_path_factory.mktemp("reach")
    files = {**REACHED, **SPARED}
    points = {"dovetail.draft_worker.v1": {name: f"acme.{name}:Old" for name in files}}
    modules = {
        f"acme/{name}.py": text for name, text in {"__init__": "", "beside": BESIDE, "handed": HANDED, **files}.items()
    }
    write_distribution(site, "acme", entry_points=points, modules=modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        return diagnose(Registry.scan(), ["acme"])


@pytest.mark.parametrize("name", REACHED)
def test_what_a_class_refers_to_is_its_own_use_however_it_is_named(diagnosis, name):
    found = [one for one in diagnosis.findings if f"'{name}'" in one.subject]
    assert [(one.code, USED in one.message) for one in found] == [("newer-member", True)]


@pytest.mark.parametrize("name", SPARED)
def test_what_a_class_does_not_use_is_not_held_against_it(diagnosis, name):
    [entry] = [entry for entry in diagnosis.entries if entry.name == name]
    assert diagnosis.of(entry) == []
