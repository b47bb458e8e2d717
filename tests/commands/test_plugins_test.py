"""`dovetail plugins test`: a suite on a plugin, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dovetail.contracts.kinds import KINDS
from dovetail.plugins.commands.plugins.suite_end import End, read_end, summary, unfinished_report
from dovetail.plugins.commands.plugins.suite_page import suite_page
from dovetail.registry.entries import HOOKS_KIND
from dovetail.testing._session import run_class
from dovetail.testing._watch import Journal
from dovetail.testing.local_plugins import write_distribution
from dovetail.testing.suite import SUITES, Suite

PROCESSORS = """
import os
import signal
import threading
from dovetail.contracts.logits import LogitsProcessor


class Sound(LogitsProcessor):
    "Lowers the first token."

    contract = (1, 0)

    def add_request(self, request):
        return True

    def apply(self, logits, rows):
        logits[:, 0] -= 1


class Dies(Sound):
    "Ends its process."

    def apply(self, logits, rows):
        os.kill(os.getpid(), signal.SIGKILL)


class Waits(Sound):
    "Never comes back."

    def apply(self, logits, rows):
        threading.Event().wait()


class Shifts(Sound):
    "Lowers by the number of rows."

    def apply(self, logits, rows):
        logits[:, 0] -= len(rows)
"""

HOOKS = """
from dovetail.contracts.hooks import hookimpl


@hookimpl
def dovetail_engine_stopped():
    pass
"""


def plugins_test(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """As the installed command does it: the folder is not on its `sys.path`."""
    command = [sys.executable, "-P", "-m", "dovetail", "plugins", "test", *arguments]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "processors.py").write_text(PROCESSORS)
    return tmp_path


def test_every_kind_has_a_suite_that_takes_its_plugin() -> None:
    assert set(SUITES) == {*KINDS, HOOKS_KIND}
    for kind, described in SUITES.items():
        suite = described.load()
        assert suite.kind == kind
        assert issubclass(suite, Suite)


def test_a_sound_plugin_passes_and_the_report_has_every_case(folder: Path) -> None:
    done = plugins_test(folder, "./processors.py:Sound", "--out", "report.json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((folder / "report.json").read_text())
    assert report["kind"] == "logits_processor"
    assert report["contract"] == "1.0"
    assert report["versions"]["dovetail"]
    outcomes = [result["outcome"] for result in report["results"]]
    assert f"{outcomes.count('passed')} passed, 0 failed, {outcomes.count('skipped')} skipped" in done.stdout


def test_a_faulty_plugin_fails_and_its_tests_are_named(folder: Path) -> None:
    done = plugins_test(folder, "./processors.py:Shifts")
    assert done.returncode == 1
    assert "FAILED   test_a_row_does_not_depend_on_other_requests" in done.stdout


def test_a_known_deviation_is_reported_by_name(folder: Path) -> None:
    name, reason = "test_a_row_does_not_depend_on_other_requests", "the penalty is shared out"
    done = plugins_test(
        folder,
        *("./processors.py:Shifts", "--page", "report.html"),
        *("--set", f"quirks={{{name}: {{reason: {reason}, expires: '2.0'}}}}"),
    )
    assert f"quirk    {name}: quirk until contract 2.0: {reason}" in done.stdout, done.stdout + done.stderr
    assert f"FAILED   {name}\n" not in done.stdout
    page = (folder / "report.html").read_text()
    assert f"<td>{name}</td><td>quirk until contract 2.0: {reason}</td>" in page
    assert "<h3>test_rows_come_in_any_order</h3>" in page
    assert not (folder / "report.json").exists()
    refused = plugins_test(folder, "./processors.py:Shifts", "--set", f"quirks={{{name}: {{reason: {reason}}}}}")
    assert refused.returncode == 2
    assert "expires" in refused.stderr


def test_a_plugin_that_hangs_in_import_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "waits_for_good.py").write_text("import threading\n\nthreading.Event().wait()\n")
    (tmp_path / "hangs.py").write_text("import waits_for_good\n")
    for reference in (["./hangs.py:Drafter"], ["./hangs.py:Drafter", "--kind", "draft_worker"]):
        done = plugins_test(tmp_path, *reference, "--timeout", "2")
        assert done.returncode == 3
        assert re.match(r"error: importing \S+hangs.py:Drafter did not end in 2 s: it hangs in ", done.stderr)
        assert "waits_for_good.py, line 3 " in done.stderr


class InTheMiddle:
    """Three cases; the second looks at what the first has left."""

    journal: ClassVar[Path]
    left: ClassVar[dict[str, Any]]

    def test_a(self) -> None:
        assert "a" == "b"

    def test_b(self) -> None:
        end = End("test_b", "hung", "test_b did not end", "plugin.py, line 7 in apply")
        type(self).left.update(unfinished_report(self.journal, end) or {})

    def test_c(self) -> None: ...


def test_a_journal_gives_a_report_at_any_time(tmp_path: Path) -> None:
    left: dict[str, Any] = {}
    journal = Journal(tmp_path / "journal")
    assert unfinished_report(tmp_path / "journal", End("test_b", "hung", "")) is None
    facts = ("plugin", "kind", "contract", "suite", "reference", "distribution", "machine", "time")
    journal.write({**dict.fromkeys(facts, "x"), "attributes": {}, "versions": {"dovetail": "1"}, "hints": []})
    run_class(InTheMiddle, {"journal": tmp_path / "journal", "left": left}, journal=journal)
    found = [(result["name"], result["outcome"]) for result in left["results"]]
    assert found == [("test_a", "failed"), ("test_b", "hung"), ("test_c", "not run")]
    assert left["results"][1]["text"] == "test_b did not end\n\nplugin.py, line 7 in apply"
    said = summary(left)
    assert said.startswith("FAILED   test_a\n")
    assert said.endswith("x (x x), x: 1 failed, 1 hung, 1 not run")
    page = suite_page(left)
    assert "The suite hung: 1 of 3 tests did not run." in page
    assert "<h3>test_b</h3><pre>test_b did not end" in page


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("plugin", "outcome", "error"),
    [
        ("Dies", "died", r"error: (test_\w+): the process ended by signal SIGKILL\n"),
        (
            "Waits",
            "hung",
            r"error: (test_\w+) did not end in 20 s: it hangs in \S+processors.py, line \d+"
            r" \(the test is at \S+logits_suite.py, line \d+\) \(--timeout sets the limit\)\n",
        ),
    ],
)
def test_what_ended_before_a_test_hangs_or_dies_is_reported(
    folder: Path, plugin: str, outcome: str, error: str
) -> None:
    arguments = ("--timeout", "20", "--out", "report.json", "--page", "report.html")
    done = plugins_test(folder, f"./processors.py:{plugin}", *arguments)
    assert done.returncode == 3
    said = re.fullmatch(error, done.stderr)
    assert said is not None, done.stderr
    report = json.loads((folder / "report.json").read_text())
    by_outcome: dict[str, list[str]] = {}
    for result in report["results"]:
        by_outcome.setdefault(result["outcome"], []).append(result["name"])
    assert by_outcome[outcome] == [said[1]]
    assert by_outcome["passed"]
    assert by_outcome["not run"]
    sums = ", ".join(f"{len(by_outcome[name])} {name}" for name in ("passed", outcome, "not run"))
    assert f"dovetail.testing.LogitsProcessorSuite: {sums}\n" in done.stdout
    page = (folder / "report.html").read_text()
    assert f"The suite {outcome}: {len(by_outcome['not run'])} of {len(report['results'])} tests did not run." in page
    assert f"<h3>{said[1]}</h3>" in page


@pytest.mark.parametrize(
    ("innermost", "named"),
    [
        ("/x/testing/scheduler_simulation.py", "/x/testing/scheduler_suite.py, line 70"),
        (
            "/x/acme/scheduler.py",
            "/x/acme/scheduler.py, line 9 (the test is at /x/testing/scheduler_suite.py, line 70)",
        ),
        (threading.__file__, "/x/testing/scheduler_suite.py, line 70"),
    ],
)
def test_where_a_test_hangs_is_a_line_of_the_plugin_or_of_the_test(innermost: str, named: str) -> None:
    stack = (
        "Thread 0x0000 (most recent call first):\n"
        '  File "/x/other.py", line 1 in run\n\n'
        "Thread 0x0001 (most recent call first):\n"
        f'  File "{innermost}", line 9 in advance\n'
        '  File "/x/testing/scheduler_simulation.py", line 30 in step\n'
        '  File "/x/testing/scheduler_suite.py", line 70 in test_all_end\n'
        '  File "/x/pytest/runner.py", line 5 in run\n'
    )
    end = read_end(f"test_all_end[3]\nTimeout (0:00:20)!\n{stack}", 1, 20)
    assert end.message == f"test_all_end[3] did not end in 20 s: it hangs in {named} (--timeout sets the limit)"
    assert end.stack.splitlines()[-1] == "/x/testing/scheduler_suite.py, line 70 in test_all_end"


def test_what_could_be_declared_is_a_hint(tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text("raise RuntimeError('no file of this folder stands for a library')")
    (tmp_path / "attention.py").write_text(
        "from dataclasses import replace\n"
        "from dovetail.attention_backends.reference import ReferenceBackend\n"
        "class Modest(ReferenceBackend):\n"
        "    capabilities = replace(\n"
        "        ReferenceBackend.capabilities, sinks=False, dtypes=frozenset({'float32'})\n"
        "    )\n"
    )
    done = plugins_test(
        tmp_path, "./attention.py:Modest", "--set", "num_cases=1", "--out", "report.json", "--page", "report.html"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped  test_equals_the_oracle[float32-sinks]: Modest does not declare sinks" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    hints = {hint["capability"]: hint["tests"] for hint in report["hints"]}
    assert hints["sinks"] == ["test_equals_the_oracle[float32-sinks]"]
    assert "dtypes bfloat16" in hints
    assert "hint     sinks could be declared: 1 tests pass with it" in done.stdout
    assert "<td>sinks</td><td>1</td>" in (tmp_path / "report.html").read_text()


def test_an_installed_plugin_goes_by_its_name(folder: Path) -> None:
    done = plugins_test(folder, "no_repeat_ngram", "--set", "request_options=[2, 3]", "--set", "refused_options=[0]")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dovetail:no_repeat_ngram (logits_processor 1.0)" in done.stdout


def test_a_wheel_that_lacks_a_module_fails_also_where_its_sources_lie(folder: Path) -> None:
    (folder / "left_out.py").write_text("")
    site = folder / "site"
    points = {"dovetail.logits_processor.v1": {"partial": "partial_processor:Sound"}}
    modules = {"partial_processor.py": f"import left_out\n{PROCESSORS}"}
    write_distribution(site, "partial", entry_points=points, modules=modules)
    done = plugins_test(folder, "partial", "--no-hints", PYTHONPATH=str(site))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "No module named 'left_out'" in done.stderr
    done = plugins_test(folder, "partial", "--no-hints", PYTHONPATH=f"{site}{os.pathsep}{folder}")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly
def test_a_route_is_tested_with_a_path_and_a_body(folder: Path) -> None:
    body = "body_template={prompt: $prompt, max_tokens: $num_tokens, ignore_eos: true}"
    done = plugins_test(folder, "completions", "--set", "path=/v1/completions", "--set", body)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dovetail.testing.GeneratingRouteSuite: 26 passed" in done.stdout
    done = plugins_test(folder, "health", "--suite", "RouteSuite")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dovetail.testing.RouteSuite: 5 passed" in done.stdout


@pytest.mark.nightly
def test_hooks_go_by_their_name_too(tmp_path: Path) -> None:
    write_distribution(
        tmp_path,
        "acme",
        entry_points={"dovetail.hooks.v1": {"acme_hooks": "acme_hooks"}},
        modules={"acme_hooks.py": HOOKS},
    )
    for arguments in (["acme_hooks"], ["ACME:acme_hooks"], ["acme_hooks", "--kind", "hooks"]):
        done = plugins_test(tmp_path, *arguments, PYTHONPATH=str(tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "acme:acme_hooks (hooks " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "there is no plugin 'nothing'"),
        (["./processors.py:Sound", "--kind", "scheduler"], "is no subclass of"),
        (["hf"], "needs a model that the source finds: write reference = ... (--set reference=NAME)"),
        (["health"], "a route that generates no text has the RouteSuite (--suite RouteSuite)"),
        (["fcfs", "--suite", "RouteSuite"], "there is no suite RouteSuite of kind scheduler"),
        (["int8", "--kind", "quantization"], "--set tolerance=VALUE"),
        (["fcfs", "--set", "colour=red"], "has no attribute 'colour'"),
        (["fcfs", "--set", "colour"], "write NAME=VALUE"),
        (["fcfs", "--kind", "sheduler"], "there is no plugin kind 'sheduler'"),
        (["nothing", "--kind", "hooks"], "there are no hooks 'nothing'"),
        (["./processors.py:Sound", "--out", "gone/report.json"], "there is no folder gone"),
        (["./processors.py:Sound", "--page", "gone/report.html"], "there is no folder gone"),
        (["./processors.py:Sound", "--out", "."], "is a folder: name a file"),
    ],
)
def test_what_cannot_be_tested_is_one_message(folder: Path, arguments: list[str], message: str) -> None:
    done = plugins_test(folder, *arguments)
    assert done.returncode == 2
    assert " passed" not in done.stdout
    assert "report:" not in done.stdout
    assert message in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
