"""`make conformance` runs the suites of bundled plugins, and no other test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MIXED = """
from dovetail.schedulers.fcfs import FCFSScheduler
from dovetail.spec_decode.greedy import GreedyRule
from dovetail.testing import AcceptanceRuleSuite, SchedulerSuite


class Mine(FCFSScheduler):
    pass


class TestBundled(SchedulerSuite):
    plugin = FCFSScheduler


class TestOther(SchedulerSuite):
    plugin = Mine


class TestOtherKind(AcceptanceRuleSuite):
    plugin = GreedyRule


def test_something_else():
    assert False
"""


@pytest.mark.nightly
def test_the_cases_of_bundled_plugins_are_run_and_recorded(tmp_path: Path) -> None:
    """Of one kind here; a file that names no suite is not imported."""
    (tmp_path / "test_mixed.py").write_text(MIXED)
    (tmp_path / "test_plain.py").write_text("1 / 0")
    record = tmp_path / "record.json"
    record.write_text('{"grammar:kept": {}}')
    options = ["-q", "-p", "no:cacheprovider", "-p", "conformance_record", "--rootdir", str(tmp_path), "-c", os.devnull]
    chosen = ["--conformance", str(record), "--conformance-kind", "scheduler", "-k", "declares_its or something"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    command = [sys.executable, "-m", "pytest", *options, *chosen, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(record.read_text())
    assert sorted(found) == ["grammar:kept", "scheduler:fcfs"]
    assert found["scheduler:fcfs"]["passed"] == 1
