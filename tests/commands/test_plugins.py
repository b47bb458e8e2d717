"""The command line as users run it: in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dovetail.plugins.commands.plugins import PluginsCommand
from dovetail.testing.local_plugins import write_distribution

SINK = """
from pydantic import Field
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.telemetry import TelemetrySink

class Options(PluginOptions):
    every: int = Field(10, ge=1, description="Steps between two lines.")

class Sink(TelemetrySink):
    "Prints a line now and then."

    contract = (1, 0)
    stability = "experimental"
    Options = Options
"""
COMMAND = """
import typer
from dovetail.contracts.command import Command
from dovetail.contracts.errors import ConfigError, ModelError

class Greet(Command):
    "Say hello."

    contract = (1, 0)

    def app(self):
        app = typer.Typer()

        @app.command()
        def greet(name: str):
            if name == "config":
                raise ConfigError("unknown key [modle]")
            if name == "model":
                raise ModelError("no such model")
            print(f"hello {name}")

        return app
"""
RUN = "import sys; from dovetail.commands.main import main; main()"


def plugins(*arguments: str) -> Any:
    """What `dovetail plugins ARGUMENTS` does here, as click's `Result`."""
    return CliRunner().invoke(PluginsCommand().app(), arguments, env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.fixture
def dovetail(tmp_path: Path):
    """Runs `dovetail ARGS` with `tmp_path` on the path of importable distributions."""

    def run(*arguments: str, code: str = RUN) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path), "TERM": "dumb"},
        )

    return run


@pytest.fixture
def acme(tmp_path: Path) -> Path:
    """A distribution with a sink, a command, and a sink that raises on import."""
    write_distribution(
        tmp_path,
        "acme",
        entry_points={
            "dovetail.telemetry_sink.v1": {"acme": "acme_sink:Sink"},
            "dovetail.command.v1": {"greet": "acme_greet:Greet"},
        },
        modules={"acme_sink.py": SINK, "acme_greet.py": COMMAND},
    )
    return tmp_path


LOADED = """
import sys
from dovetail.commands.main import main
try:
    main()
finally:
    print("loaded:", sorted({"torch", "transformers", "acme_sink", "acme_greet"} & set(sys.modules)))
"""


@pytest.mark.parametrize("arguments", [["--help"], ["plugins", "list"], ["--version"], ["plugins", "list", "--json"]])
def test_listing_commands_import_neither_torch_nor_plugins(dovetail, acme, arguments):
    result = dovetail(*arguments, code=LOADED)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("loaded: []\n")


def test_importing_dovetail_is_light(dovetail):
    code = "import sys, dovetail; print(sorted({'torch', 'transformers', 'pydantic', 'numpy'} & set(sys.modules)))"
    assert dovetail(code=code).stdout == "[]\n"


def test_help_lists_plugin_commands_with_their_distribution(dovetail, acme):
    output = dovetail("--help").stdout
    assert re.search(r"greet\s+Say hello\. \(acme 1\.0\)", output)


def test_help_survives_a_command_whose_source_is_gone(dovetail, tmp_path):
    write_distribution(tmp_path, "acme", entry_points={"dovetail.command.v1": {"lost": "acme_gone.cli:Lost"}})
    assert re.search(r"lost\s+A command \(acme 1\.0\)", dovetail("--help").stdout)


def test_a_plugin_command_runs(dovetail, acme):
    assert dovetail("greet", "you").stdout == "hello you\n"


@pytest.mark.parametrize(("name", "code"), [("config", 2), ("model", 1)])
def test_an_error_is_one_message_and_an_exit_code(dovetail, acme, name, code):
    result = dovetail("greet", name)
    assert result.returncode == code
    expected = {"config": "unknown key [modle]", "model": "no such model"}[name]
    assert result.stderr == f"error: {expected}\n"
    assert "Traceback" in dovetail("--traceback", "greet", name).stderr


def test_a_plugin_command_cannot_take_a_built_in_name(dovetail, tmp_path):
    write_distribution(tmp_path, "acme", entry_points={"dovetail.command.v1": {"plugins": "acme_greet:Greet"}})
    (tmp_path / "acme_greet.py").write_text(COMMAND)
    assert "scheduler" in dovetail("plugins", "list").stdout
    assert dovetail("acme:plugins", "you").stdout == "hello you\n"


def test_list_shows_which_name_a_config_writes_where_dovetail_has_the_name(dovetail, acme):
    write_distribution(acme, "other", entry_points={"dovetail.scheduler.v1": {"fcfs": "other_sched:FCFS"}})
    rows = [line.split() for line in dovetail("plugins", "list").stdout.splitlines() if "fcfs" in line]
    assert [row[3] for row in rows] == ["fcfs", "other:fcfs"]


def test_list_shows_each_plugin_with_its_reference(dovetail, acme):
    row = next(line for line in dovetail("plugins", "list").stdout.splitlines() if "acme_sink" in line)
    for cell in ("telemetry_sink", "acme 1.0", "v1", "acme_sink:Sink"):
        assert cell in row
    assert "experimental" in row
    listed = json.loads(dovetail("plugins", "list", "--kind", "command", "--json").stdout)
    assert all(entry["stability"] == "provisional" for entry in listed)
    assert ("greet", "acme") in [(entry["name"], entry["distribution"]) for entry in listed]


def test_an_unknown_kind_is_refused_with_the_kinds(dovetail):
    result = dovetail("plugins", "list", "--kind", "sheduler")
    assert result.returncode == 2
    assert "there is no plugin kind 'sheduler'. Did you mean scheduler? Kinds: executor," in result.stderr


def test_info_shows_what_a_plugin_says_about_itself(dovetail, acme):
    output = dovetail("plugins", "info", "acme").stdout
    for text in ("Prints a line now and then.", "experimental", "acme 1.0", "every", "Ge(ge=1)", "Steps between"):
        assert text in output


def test_info_shows_capabilities_of_a_local_file_of_any_kind(dovetail, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dovetail.contracts.speculation import DraftCapabilities, DraftWorker\n"
        "class Mine(DraftWorker):\n"
        "    contract = (1, 0)\n"
        "    capabilities = DraftCapabilities(trees=True)\n"
        "    def propose(self, batch): return []\n"
    )
    output = dovetail("plugins", "info", "./mine.py:Mine").stdout
    assert "draft_worker" in output
    assert [line.split() for line in output.splitlines()].count(["capabilities.trees", "yes"]) == 1
    assert "takes no options" in output


def test_info_shows_what_hooks_listen_to(dovetail, tmp_path):
    source = (
        '"""Says good bye."""\n'
        "from dovetail.contracts.hooks import hookimpl\n"
        "@hookimpl\n"
        "def dovetail_engine_stopped(): pass\n"
    )
    points = {"dovetail.hooks.v1": {"bye": "bye_hooks"}}
    write_distribution(tmp_path, "bye", entry_points=points, modules={"bye_hooks.py": source})
    output = dovetail("plugins", "info", "bye").stdout
    for text in ("Says good bye.", "bye 1.0", "listens to", "dovetail_engine_stopped"):
        assert text in output


def test_a_local_file_imports_the_file_beside_it(dovetail, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.py").write_text(f"from beside import EVERY\n{SINK.replace('Field(10', 'Field(EVERY')}")
    (tmp_path / "sub" / "beside.py").write_text("EVERY = 1234\n")
    result = dovetail("plugins", "info", "./sub/mine.py:Sink")
    assert "1234" in result.stdout, result.stderr


def test_doctor_finds_nothing_wrong_with_what_is_installed(dovetail):
    result = dovetail("plugins", "doctor")
    assert (result.returncode, result.stderr) == (0, "")
    assert "nothing wrong was found" in result.stdout


def test_doctor_without_names_shows_what_it_found_and_counts_the_rest(acme, monkeypatch):
    monkeypatch.syspath_prepend(acme)
    points = {"dovetail.telemetry_sink.v1": {"jsonl": "twin_sink:Sink", "gone": "no_such_sink:Sink"}}
    write_distribution(acme, "twin", entry_points=points, modules={"twin_sink.py": SINK})
    short, whole = plugins("doctor").output, plugins("doctor", "--verbose").output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in short.splitlines() if line.startswith("│")]
    twin = [row for row in rows if row[2] == "twin 1.0"]
    assert twin == [
        ["telemetry_sink", "gone", "twin 1.0", "module-gone"],
        ["telemetry_sink", "jsonl", "twin 1.0", "taken-name"],
    ]
    assert "acme 1.0: 2 plugins, metadata ok\n" in short
    assert "twin 1.0: 2 plugins, 2 with findings\n" in short
    assert "none imported" in short
    assert not [row for row in rows if row[3] == "ok"]
    assert re.search(r"greet\s*│ acme 1\.0\s*│ metadata ok", whole)


def test_doctor_says_ok_of_no_plugin_whose_distribution_has_a_finding(acme, monkeypatch):
    monkeypatch.syspath_prepend(acme)
    write_distribution(
        acme,
        "twin",
        entry_points={"dovetail.telemetry_sink.v1": {"twin": "twin_sink:Sink"}},
        modules={"twin_sink.py": SINK},
        requires=("numpy>=99",),
    )
    output = plugins("doctor", "twin").output
    assert re.search(r"│ twin 1\.0\s*│ missing-dependency", output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("info", "ngrm"), "there is no plugin 'ngrm'. Did you mean 'ngram'?"),
        (("test", "nosuch"), "there is no plugin 'nosuch'. See `dovetail plugins list`."),
        (("info", "dist/x-1.whl"), "'dist/x-1.whl' is a wheel file: install it, then name a plugin of it"),
        (("test", "x-1.whl", "--kind", "scheduler"), "'x-1.whl' is a wheel file: install it, then name a plugin of it"),
    ],
)
def test_an_unknown_name_is_answered_with_what_is_near_alone(arguments, message):
    assert str(plugins(*arguments).exception) == message


def test_doctor_says_what_is_near_and_what_a_wheel_is_for():
    output = plugins("doctor", "ngrm", "dist/x-1.whl").output
    assert "Did you mean 'ngram'?" in output
    assert "That is a wheel file: install it" in output


def test_doctor_examines_references_and_names_and_goes_on(dovetail, acme):
    (acme / "odd.py").write_text("class Odd: pass\n")
    (acme / "mine.py").write_text(SINK)
    write_distribution(
        acme,
        "wreck",
        entry_points={"dovetail.telemetry_sink.v1": {"wreck": "wreck_sink:Sink"}},
        modules={"wreck_sink.py": "raise RuntimeError('no luck')"},
    )
    result = dovetail("plugins", "doctor", "./mine.py:Sink", "./odd.py:Odd", "wreck", "acme:acme")
    assert result.returncode == 1
    rows = [line for line in result.stdout.splitlines() if line.startswith("│")]
    status = {line.split()[3]: line.split("│")[-2].strip() for line in rows}
    assert status == {"./mine.py:Sink": "ok", "./odd.py:Odd": "not-of-kind", "wreck": "cannot-import", "acme": "ok"}
    assert "raise RuntimeError('no luck')" in result.stdout


def test_a_broken_plugin_that_nobody_chose_leaves_the_rest_alone(dovetail, acme):
    write_distribution(acme, "wreck", entry_points={"dovetail.command.v1": {"wreck": "wreck_sink:Sink"}})
    (acme / "wreck_sink.py").write_text("raise RuntimeError('no luck')")
    assert dovetail("greet", "you").stdout == "hello you\n"
    result = dovetail("wreck")
    assert result.returncode == 1
    assert "RuntimeError: no luck" in result.stderr
