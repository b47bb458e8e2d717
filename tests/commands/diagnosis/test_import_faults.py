"""Imports that fail, hang or end their process cost the plugin alone; what only metadata and sources show is found
without an import."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.commands.installed import CODES, Finding
from dovetail.testing.local_plugins import write_distribution

GROUP = "dovetail.telemetry_sink.v1"
SINK = """
from dovetail.contracts.telemetry import TelemetrySink

class Sink(TelemetrySink):
    contract = (1, 0)
"""
MARK = "import pathlib\npathlib.Path(__file__).with_suffix('.imported').touch()\n"


def codes(findings: tuple[Finding, ...], subject: str) -> list[str]:
    return [one.code for one in findings if subject in one.subject]


def test_faults_of_an_import_cost_the_plugin_alone(examine, tmp_path):
    sources = {
        "hangs": "import threading\nthreading.Event().wait()\n",
        "exits": "import os\nos._exit(7)\n",
        "raises": "print('noise on stdout')\n1 / 0\n",
        "checks": f"{SINK}    @classmethod\n    def check(cls, need, options, environment):\n"
        "        import threading\n        threading.Event().wait()\n",
        "sound": f"print('noise on stdout')\n{SINK}",
    }
    points = {GROUP: {name: f"acme_{name}:Sink" for name in sources}}
    modules = {f"acme_{name}.py": source for name, source in sources.items()}
    write_distribution(tmp_path, "acme", entry_points=points, modules=modules)
    diagnosis = examine(*(f"acme:{name}" for name in sources), timeout_s=10.0)
    found = {entry.name: [one.code for one in diagnosis.of(entry)] for entry in diagnosis.entries}
    assert found == {
        "hangs": ["hangs-in-import"],
        "checks": ["hangs-in-check"],
        "exits": ["ends-process"],
        "raises": ["cannot-import"],
        "sound": [],
    }
    [exits] = [one for one in diagnosis.findings if one.code == "ends-process"]
    assert "exit code 7" in exits.message
    [raises] = [one for one in diagnosis.findings if one.code == "cannot-import"]
    assert "ZeroDivisionError" in raises.message


def test_without_names_nothing_is_imported_and_sources_are_read(examine, tmp_path):
    private = (
        "from dovetail.engine.core import EngineCore\n"
        "from dovetail.contracts.needs import _sentences\n"
        "from dovetail.nn import RMSNorm\n"
    )
    write_distribution(
        tmp_path,
        "acme",
        entry_points={GROUP: {"peeks": "acme.peeks:Sink", "moved": "acme.gone:Sink", "renamed": "acme.peeks:Zink"}},
        modules={
            "acme/__init__.py": "",
            "acme/inner.py": private,
            "acme/peeks.py": f"{MARK}from . import inner\n{SINK}",
        },
    )
    findings = examine().findings
    assert not (tmp_path / "acme" / "peeks.imported").exists()
    private_imports = [one.message for one in findings if one.code == "private-import" and "'peeks'" in one.subject]
    assert len(private_imports) == 2
    assert any(
        "EngineCore from dovetail.engine.core" in message and "line 1)" in message for message in private_imports
    )
    assert any("_sentences" in message for message in private_imports)
    assert codes(findings, "'moved'") == ["module-gone"]
    assert "class-gone" in codes(findings, "'renamed'")
    assert not [one for one in findings if "dovetail 0." in one.subject]


DRAFTER = """
from dovetail.contracts.speculation import DraftCapabilities, DraftWorker

class Drafter(DraftWorker):
    contract = (1, 0)
    capabilities = DraftCapabilities(tensor_parallel=None, stateless=True)

    def propose(self, batch):
        return [None for _ in batch.requests]
"""


FOREIGN = {
    "llm": ("from dovetail import LLM", "LLM from dovetail", "command"),
    "late": ("def load(): from dovetail import LLMEngine as Engine", "LLMEngine from dovetail", "command"),
    "dotted": ("import dovetail; load = lambda: dovetail.AsyncLLMEngine", "AsyncLLMEngine from dovetail", "command"),
    "command": ("from dovetail.commands import explain", "explain from dovetail.commands", "command"),
    "scheduler": ("from dovetail.schedulers import batching", "batching from dovetail.schedulers", "scheduler"),
    "executor": ("import dovetail.executors.processes", "dovetail.executors.processes", "executor"),
}


def test_an_import_for_another_kind_is_reported_with_that_kind(examine, tmp_path):
    points = {"dovetail.draft_worker.v1": {name: f"acme_{name}:Drafter" for name in FOREIGN}}
    modules = {f"acme_{name}.py": f"{line}\n{DRAFTER}" for name, (line, *_) in FOREIGN.items()}
    write_distribution(tmp_path, "acme", entry_points=points, modules=modules)
    found = {one.subject: one for one in examine().findings}
    assert len(found) == len(FOREIGN)
    for name, (_, what, kind) in FOREIGN.items():
        one = found[f"draft_worker '{name}' (acme 1.0)"]
        assert (one.code, one.severity) == ("foreign-import", "warning")
        assert f"{what} is imported, which is for plugins of kind {kind} (" in one.message
        assert f"acme_{name}.py, line 1)" in one.message


def test_imports_of_a_file_are_judged_by_the_kind_of_its_class(examine, tmp_path):
    (tmp_path / "mine.py").write_text(f"from dovetail import LLM\n{DRAFTER}")
    [found] = examine(f"{tmp_path}/mine.py:Drafter").findings
    assert (found.code, found.subject.partition(" ")[0]) == ("foreign-import", "draft_worker")


def test_imports_for_all_kinds_or_its_own_are_not_reported(examine, tmp_path):
    common = (
        "import dovetail\nfrom dovetail import __version__\nfrom dovetail.nn import RMSNorm\n"
        "assert dovetail.__version__ == __version__\n"
    )
    points = {
        "dovetail.draft_worker.v1": {"mine": "acme_both.drafter:Drafter"},
        "dovetail.command.v1": {"mine": "acme_both.commands:Mine"},
    }
    modules = {
        "acme_both/__init__.py": "",
        "acme_both/drafter.py": f"{common}{DRAFTER}",
        "acme_both/commands.py": f"{common}import dovetail.commands\nfrom dovetail import LLM\n"
        "from dovetail.contracts.command import Command\nclass Mine(Command): ...\n",
    }
    write_distribution(tmp_path, "acme", entry_points=points, modules=modules)
    assert examine().findings == ()


def test_a_missing_extra_is_named_with_its_installation(examine, tmp_path):
    write_distribution(
        tmp_path,
        "acme",
        entry_points={GROUP: {"far": "acme_far:Sink"}},
        modules={"acme_far.py": f"import quantum_annealer\n{SINK}"},
        requires=('quantum-annealer>=2; extra == "far"', "numpy>=99", "typer"),
    )
    findings = examine("far").findings
    assert codes(findings, "acme") == ["missing-dependency", "missing-extra"]
    assert [one.remedy for one in findings] == ['pip install "numpy>=99"', 'pip install "acme[far]"']


def test_another_python_is_told_by_tag_and_by_requirement(examine, tmp_path):
    info = write_distribution(
        tmp_path, "acme", entry_points={GROUP: {"old": "acme_old:Sink"}}, modules={"acme_old.py": SINK}
    )
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nTag: cp27-cp27m-win32\n")
    with (info / "METADATA").open("a") as file:
        file.write("Requires-Python: <3.8\n")
    found = [one for one in examine("old").findings if one.code == "other-python"]
    assert [one.message.partition(",")[0] for one in found] == [
        "acme 1.0 requires Python <3.8",
        "acme 1.0 is a wheel for cp27-cp27m-win32",
    ]


def test_files_that_are_gone_or_edited_are_named(examine, tmp_path):
    modules = {"acme_sink.py": SINK, "acme_gone.py": "", "acme_edited.py": "A = 1\n"}
    info = write_distribution(tmp_path, "acme", entry_points={GROUP: {"acme": "acme_sink:Sink"}}, modules=modules)
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"A = 0\n").digest()).rstrip(b"=").decode()
    text = (info / "RECORD").read_text().replace("acme_edited.py,,", f"acme_edited.py,sha256={digest},6")
    (info / "RECORD").write_text(text)
    (tmp_path / "acme_gone.py").unlink()
    found = {one.code: one.message for one in examine("acme").findings}
    assert found.keys() == {"missing-files", "edited-files"}
    assert "acme_gone.py" in found["missing-files"]
    assert "acme_edited.py" in found["edited-files"]


def test_one_distribution_twice_on_the_path_and_an_egg_info_that_shadows(examine, tmp_path):
    tree, site = tmp_path / "tree", tmp_path / "site"
    write_distribution(site, "acme", entry_points={GROUP: {"acme": "acme_sink:Sink"}}, modules={"acme_sink.py": SINK})
    (tree / "acme.egg-info").mkdir(parents=True)
    (tree / "acme.egg-info" / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 0.9\n")
    (tree / "acme.egg-info" / "entry_points.txt").write_text(f"[{GROUP}]\nolder = acme_sink:Sink\n")
    [finding] = [one for one in examine(folders=(tree, site)).findings if one.code == "stale-copy"]
    assert f"0.9 in {tree}" in finding.message
    assert f"1.0 in {site}" in finding.message


def test_names_of_two_distributions_and_of_dovetails_own(examine, tmp_path):
    for name in ("acme", "other"):
        points = {GROUP: {"same": f"{name}_sink:Sink", "jsonl": f"{name}_sink:Sink"}}
        write_distribution(tmp_path, name, entry_points=points, modules={f"{name}_sink.py": SINK})
    findings = examine().findings
    [twice] = [one for one in findings if one.code == "duplicate-name"]
    assert "['acme:same', 'other:same']" in twice.message
    taken = [one.remedy for one in findings if one.code == "taken-name"]
    assert taken == ["Write 'acme:jsonl' in configs.", "Write 'other:jsonl' in configs."]


def test_an_entry_point_without_a_class_and_one_of_another_contract(examine, tmp_path):
    points = {GROUP: {"formless": "acme_sink"}, "dovetail.scheduler.v7": {"later": "acme_sink:Sink"}}
    write_distribution(tmp_path, "acme", entry_points=points, modules={"acme_sink.py": SINK})
    findings = examine("formless", "later", "nowhere").findings
    assert codes(findings, "formless") == ["bad-entry-point"]
    assert codes(findings, "later") == ["other-contract"]
    assert codes(findings, "nowhere") == ["unknown-name"]


def test_what_to_do_about_a_reference_speaks_of_the_reference(examine, tmp_path):
    (tmp_path / "mine.py").write_text(SINK)
    expected = {
        f"{tmp_path}/mine.py:Nope": ("class-gone", "name a class that is in it"),
        "no_such_module:Sink": ("module-gone", "PYTHONPATH"),
        f"{tmp_path}/gone.py:Sink": ("unknown-name", "Correct the path"),
        f"{tmp_path}/mine.py": ("unknown-name", f"Write '{tmp_path}/mine.py:Class'"),
    }
    for name, (code, remedy) in expected.items():
        [finding] = examine(name).findings
        assert (finding.code, remedy in finding.remedy) == (code, True), finding


def test_hooks_that_match_none_are_told(examine, tmp_path):
    source = "from dovetail.contracts.hooks import hookimpl\n@hookimpl\ndef dovetail_engine_startd(): ...\n"
    write_distribution(
        tmp_path, "acme", entry_points={"dovetail.hooks.v1": {"acme": "acme_hooks"}}, modules={"acme_hooks.py": source}
    )
    assert codes(examine("acme").findings, "acme") == ["hooks-not-registered"]


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["--strict"], 1), (["broken"], 1), (["--json"], 0)])
def test_exit_codes_and_json(tmp_path: Path, arguments, code):
    source = f"from dovetail.engine.core import EngineCore\n{SINK}"
    modules = {"acme_sink.py": source, "acme_broken.py": "1 / 0\nSink = None\n"}
    points = {GROUP: {"peeks": "acme_sink:Sink", "broken": "acme_broken:Sink"}}
    write_distribution(tmp_path, "acme", entry_points=points, modules=modules)
    result = subprocess.run(
        [sys.executable, "-m", "dovetail", "plugins", "doctor", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "TERM": "dumb"},
    )
    assert result.returncode == code, result.stdout + result.stderr
    if arguments == ["--json"]:
        data = json.loads(result.stdout)
        assert {one["code"] for one in data["findings"]} == {"private-import"}
        assert {one["code"] for one in data["findings"]} <= CODES.keys()
        assert "acme" in [one["distribution"] for one in data["examined"]]
