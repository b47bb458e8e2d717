"""A plugin whose import waits is named on stderr, in a process that goes on when the import does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import get_ident

import pytest

from dovetail.registry.entries import Entry
from dovetail.registry.loading import import_object
from dovetail.registry.slow_imports import module_line
from dovetail.testing.local_plugins import write_distribution

WAITS = "from pathlib import Path\n\nPath({gate!r}).read_text()\n"
"""A module that waits until somebody writes into the pipe `gate`."""
LOAD = """
import sys
from dovetail.engine.hooks import HookCaller
from dovetail.registry import Registry, slow_imports
slow_imports.PATIENCE_S = 0.05
registry = Registry.scan()
if sys.argv[1] == "hooks":
    HookCaller().load(registry.hook_entries()[0])
else:
    registry.load("telemetry_sink", sys.argv[1])
    slow_imports.PATIENCE_S = 60  # a second import would wait for ever
    registry.load("telemetry_sink", sys.argv[1])
print("loaded")
"""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "gate")
    return tmp_path / "gate"


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("patient", "telemetry_sink 'patient' (acme 1.0)"),
        ("./here.py:Sink", "telemetry_sink './here.py:Sink' ({tmp_path}/here.py:Sink)"),
        ("hooks", "hooks 'acme_hooks' (acme 1.0)"),
    ],
)
def test_an_import_that_waits_is_named_once(
    tmp_path: Path, gate: Path, name: str, label: str, sink_source: str
) -> None:
    waiting = {
        "waits.py": WAITS.format(gate=str(gate)),
        "patient_sink.py": f"import waits\n{sink_source}",
        "acme_hooks.py": "import waits",
    }
    points = {
        "dovetail.telemetry_sink.v1": {"patient": "patient_sink:Sink"},
        "dovetail.hooks.v1": {"acme_hooks": "acme_hooks"},
    }
    write_distribution(tmp_path, "acme", entry_points=points, modules=waiting)
    (tmp_path / "here.py").write_text(f"import waits\n{sink_source}")
    with subprocess.Popen(
        [sys.executable, "-c", LOAD, name],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        gate.write_text("go on")
        output, errors = process.communicate(timeout=60)
    said = f"importing {label.format(tmp_path=tmp_path)} takes more than 0.05 s"
    # The place is that of the moment: on a busy machine it may be before the module that waits.
    assert re.fullmatch(rf"{re.escape(said)}(: it is at \S+, line \d+)?\n", line)
    assert (output, errors, process.returncode) == ("loaded\n", "", 0)


def test_the_line_is_that_of_the_module_that_waits(site: Path, gate: Path) -> None:
    (site / "outer.py").write_text("import waits_here\n\nclass Sink: ...\n")
    (site / "waits_here.py").write_text(WAITS.format(gate=str(gate)))
    entry = Entry("telemetry_sink", "outer", f"{site / 'outer.py'}:Sink", 1)
    with ThreadPoolExecutor(1) as pool:
        thread = pool.submit(get_ident).result()
        assert module_line(thread) is None
        found = pool.submit(import_object, entry)
        with gate.open("w"):  # which ends when the module has opened it, too
            assert module_line(thread) == f"{site / 'waits_here.py'}, line 3"
        assert found.result().__name__ == "Sink"
