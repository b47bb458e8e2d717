"""What is installed, and what a name means: from metadata alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dovetail.contracts.errors import PluginError
from dovetail.contracts.kinds import KINDS
from dovetail.registry import Registry
from dovetail.testing.local_plugins import write_distribution

GROUP = "dovetail.telemetry_sink.v1"
MARKED = "import pathlib\npathlib.Path(__file__).with_suffix('.imported').touch()\n"


def test_listing_and_finding_import_nothing(install, site):
    registry = install("acme", entry_points={GROUP: {"acme": "acme_sink:Sink"}}, modules={"acme_sink.py": MARKED})
    entry = registry.find("telemetry_sink", "acme")
    assert (entry.distribution, entry.version, entry.reference) == ("acme", "1.0", "acme_sink:Sink")
    assert entry in registry.entries("telemetry_sink")
    assert not (site / "acme_sink.imported").exists()
    assert "acme_sink" not in sys.modules


def test_only_the_chosen_plugin_is_imported_and_only_once(install, site, sink_source):
    counting = "import pathlib\nwith pathlib.Path(__file__).with_suffix('.count').open('a') as f: f.write('x')\n"
    registry = install(
        "acme",
        entry_points={GROUP: {"chosen": "chosen:Sink", "other": "other:Sink"}},
        modules={"chosen.py": counting + sink_source, "other.py": MARKED},
    )
    first = registry.load("telemetry_sink", "chosen")
    assert Registry.scan().load("telemetry_sink", "acme:chosen") is first
    assert (site / "chosen.count").read_text() == "x"
    assert not (site / "other.imported").exists()


def test_order_is_by_name_then_distribution(install):
    install("zeta", entry_points={GROUP: {"b": "m:B", "a": "m:A"}})
    registry = install("Alpha_One", entry_points={GROUP: {"b": "m:B"}})
    found = [(e.name, e.distribution) for e in registry.entries("telemetry_sink") if e.distribution != "dovetail"]
    assert found == [("a", "zeta"), ("b", "Alpha_One"), ("b", "zeta")]


def test_a_name_of_two_distributions_must_say_which(install):
    install("acme", entry_points={GROUP: {"same": "acme_sink:Sink"}})
    registry = install("other-dist", entry_points={GROUP: {"same": "other_sink:Sink"}})
    with pytest.raises(PluginError, match="write 'acme:same' or 'other-dist:same'"):
        registry.find("telemetry_sink", "same")
    assert registry.find("telemetry_sink", "Other.Dist:same").reference == "other_sink:Sink"


def test_another_major_is_refused_with_what_to_do(install):
    registry = install("acme", entry_points={"dovetail.telemetry_sink.v2": {"future": "m:Sink"}})
    assert "future" not in {entry.name for entry in registry.entries("telemetry_sink")}
    [refused] = registry.refused("telemetry_sink")
    with pytest.raises(PluginError) as caught:
        registry.load("telemetry_sink", "future")
    assert str(caught.value) == f"{refused.label}: {refused.refusal}"
    spoken = KINDS["telemetry_sink"].version
    assert refused.refusal == (
        f"speaks telemetry_sink contract 2, this Dovetail speaks {spoken}: upgrade dovetail, "
        f"or install a version of acme written for contract {spoken}"
    )


def test_a_distribution_may_serve_two_majors(install):
    groups = {"dovetail.telemetry_sink.v2": {"both": "m:New"}, GROUP: {"both": "m:Old"}}
    registry = install("acme", entry_points=groups)
    assert registry.find("telemetry_sink", "both").reference == "m:Old"
    assert registry.refused("telemetry_sink") == []


def test_an_unknown_name_gets_the_nearest_names_and_what_was_scanned(install):
    registry = install("acme", version="3.1", entry_points={GROUP: {"printer": "m:Sink"}})
    with pytest.raises(PluginError) as caught:
        registry.find("telemetry_sink", "pritner")
    message = str(caught.value)
    assert "Did you mean 'printer'?" in message
    assert "acme 3.1" in message
    assert f"Of {registry.metadata.num_distributions} distributions" in message


def test_a_name_of_another_kind_says_so(install):
    registry = install("acme", entry_points={GROUP: {"printer": "m:Sink"}})
    with pytest.raises(PluginError, match="'printer' is the name of: telemetry_sink"):
        registry.find("scheduler", "printer")


def test_a_stale_copy_on_sys_path_is_reported(install, tmp_path, monkeypatch):
    stale = tmp_path / "stale"
    write_distribution(stale, "acme", version="0.9", entry_points={GROUP: {"gone": "m:Gone"}})
    monkeypatch.setattr(sys, "path", [*sys.path, str(stale)])
    registry = install("acme", version="1.0", entry_points={GROUP: {"here": "m:Sink"}})
    [warning] = registry.metadata.warnings
    assert "1.0 in" in warning
    assert "0.9 in" in warning
    assert "gone" in warning
    with pytest.raises(PluginError, match="more than once"):
        registry.find("telemetry_sink", "gone")


def test_a_group_of_no_known_kind_is_reported(install):
    registry = install("acme", entry_points={"dovetail.sheduler.v1": {"mine": "m:Mine"}})
    assert any("dovetail.sheduler.v1" in warning for warning in registry.metadata.warnings)


def test_an_entry_point_that_names_no_class_is_refused(install):
    registry = install("acme", entry_points={GROUP: {"odd": "just_a_module"}})
    with pytest.raises(PluginError, match=r"not of the form 'package\.module:Class'"):
        registry.load("telemetry_sink", "odd")


@pytest.mark.parametrize("absolute", [True, False])
def test_a_local_file_needs_no_packaging(tmp_path: Path, sink_source, absolute):
    (tmp_path / "mine.py").write_text(sink_source)
    name = f"{tmp_path}/mine.py:Sink" if absolute else "./mine.py:Sink"
    entry = Registry.scan().find("telemetry_sink", name, None if absolute else tmp_path)
    assert entry.reference == f"{tmp_path}/mine.py:Sink"
    assert entry.distribution is None


def test_a_local_file_that_is_not_there_is_named_in_full(tmp_path):
    with pytest.raises(PluginError, match=f"there is no file {tmp_path}/mine.py"):
        Registry.scan().find("scheduler", "mine.py:Mine", tmp_path)


@pytest.mark.parametrize("name", ["./scheds.py", "./scheds.py:", "/nowhere/scheds.py"])
def test_a_local_file_without_a_class_is_asked_for_the_class(name, tmp_path):
    file = name.rstrip(":")
    with pytest.raises(
        PluginError, match=f"^scheduler '{name}' is a file: name the class in it as well, '{file}:Class'"
    ):
        Registry.scan().find("scheduler", name, tmp_path)


def test_a_distribution_goes_before_a_module_of_the_same_name(install, sink_source):
    registry = install("acme", entry_points={GROUP: {"printer": "acme:Sink"}}, modules={"acme.py": sink_source})
    assert registry.find("telemetry_sink", "acme:printer").distribution == "acme"
    direct = registry.find("telemetry_sink", "acme:Sink")
    assert direct.distribution is None
    with pytest.raises(PluginError, match="nor has the distribution 'acme' a telemetry_sink 'prnter'"):
        registry.load("telemetry_sink", "acme:prnter")


def test_a_plain_name_is_dovetails_own_and_another_of_that_name_is_qualified(install, sink_source):
    registry = install("acme", entry_points={GROUP: {"jsonl": "acme_sink:Sink", "mine": "acme_sink:Sink"}}, modules={})
    own = registry.find("telemetry_sink", "jsonl")
    other = registry.find("telemetry_sink", "acme:jsonl")
    assert (own.distribution, other.distribution) == ("dovetail", "acme")
    assert registry.find("telemetry_sink", "dovetail:jsonl") == own
    assert [registry.name_of(entry) for entry in (own, other)] == ["jsonl", "acme:jsonl"]
    assert registry.name_of(registry.find("telemetry_sink", "mine")) == "mine"
