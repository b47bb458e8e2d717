"""`dovetail lock` as users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from dovetail.contracts.errors import ConfigError, DovetailError
from dovetail.plugins.commands.lock import LockCommand
from dovetail.testing.local_plugins import write_distribution
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

SINK = "from dovetail.contracts.telemetry import TelemetrySink\n\nclass Sink(TelemetrySink):\n    contract = (1, 0)\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A config over a tiny model, with the sink of an installed distribution."""
    model = tmp_path / "model"
    model.mkdir()
    save_tiny_model(model, tiny_config("llama"))
    points = {"dovetail.telemetry_sink.v1": {"acme": "acme_sink:Sink"}}
    write_distribution(tmp_path, "acme", entry_points=points, modules={"acme_sink.py": SINK})
    config = {
        "model": {"path": "./model", "tokenizer_mode": "none", "operators": None},
        "attention": "reference",
        "telemetry": ["acme"],
        "cache": {"num_blocks": 64},
    }
    (tmp_path / "engine.json").write_text(json.dumps(config))
    return tmp_path


class Answer(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def lock(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Answer:
    """What `run(folder, "lock", ...)` gives, in this process; what it imports of the folder does not stay."""
    with monkeypatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.chdir(folder)
        before = set(sys.modules)
        result = CliRunner().invoke(LockCommand().app(), arguments)
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file).is_relative_to(folder):
                del sys.modules[name]
    if isinstance(result.exception, DovetailError):  # as `main` ends
        return Answer(2, result.stdout, str(result.exception))
    return Answer(result.exit_code, result.stdout, result.stderr)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(folder), "TERM": "dumb"}
    command = [sys.executable, "-m", "dovetail", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


def test_a_lock_is_written_checked_compared_and_kept_to(folder, monkeypatch):
    written = run(folder, "lock", "engine.json")
    assert written.returncode == 0, written.stderr
    assert (folder / "dovetail.lock").is_file()
    limited = "equal, as far as distributions and hooks go; 1 model not compared: name the config\n"
    assert lock(folder, monkeypatch, "--check", "dovetail.lock").stdout == limited
    assert lock(folder, monkeypatch, "--check", "dovetail.lock", "engine.json").stdout == "equal\n"

    (folder / "acme_sink.py").write_text(f"{SINK}# edited\n")
    checked = lock(folder, monkeypatch, "--check", "dovetail.lock", "--json")
    assert checked.returncode == 1
    answer = json.loads(checked.stdout)
    assert (answer["equal"], answer["differences"][0]["subject"]) == (False, "distribution acme")

    refused = run(folder, "generate", "--config", "engine.json", "--lock", "dovetail.lock", "hello")
    assert refused.returncode == 2
    assert "other files: acme_sink.py" in refused.stderr

    assert lock(folder, monkeypatch, "engine.json", "--out", "new.lock", "--lock", "dovetail.lock").returncode == 0
    compared = lock(folder, monkeypatch, "--diff", "dovetail.lock", "new.lock")
    assert compared.returncode == 1
    expected = "distribution acme: the same version 1.0, and other files: acme_sink.py\nnot equal\n"
    assert compared.stdout == expected
    assert lock(folder, monkeypatch, "--diff", "new.lock", "new.lock").stdout == "equal\n"


def test_values_that_differ_are_told_and_count_where_asked_for(folder, monkeypatch):
    monkeypatch.chdir(folder)

    def here(*arguments: str) -> tuple[int, list[str]]:
        result = CliRunner().invoke(LockCommand().app(), arguments)
        return result.exit_code, result.stdout.splitlines()

    config = json.loads((folder / "engine.json").read_text()) | {"telemetry": []}  # nothing is imported to stay here
    for name, num_blocks in (("engine.json", 64), ("other.json", 65)):
        (folder / name).write_text(json.dumps(config | {"cache": {"num_blocks": num_blocks}}))
    assert here("engine.json")[0] == 0
    check = ("--check", "dovetail.lock", "other.json")
    told = "config cache.num_blocks: 64 in the lock, 65 in this config"
    summary = "equal in parts, distributions and models; 1 config value differs: cache.num_blocks"
    assert here(*check) == (0, [f"(informative) {told}", summary])
    assert here(*check, "--values") == (1, [told, "not equal"])
    assert here("other.json", "--out", "other.lock")[0] == 0
    assert here("--diff", "dovetail.lock", "other.lock")[1][-1] == summary
    assert here("--diff", "dovetail.lock", "other.lock", "--values")[0] == 1
    for refused in (("--check", "dovetail.lock", "--values"), ("engine.json", "--values")):
        assert isinstance(CliRunner().invoke(LockCommand().app(), refused).exception, ConfigError)


def test_two_questions_at_once_and_a_lock_that_is_not_there_are_refused(folder, monkeypatch):
    both = lock(folder, monkeypatch, "--check", "a.lock", "--diff", "a.lock", "b.lock")
    assert (both.returncode, "ask one" in both.stderr) == (2, True)
    absent = lock(folder, monkeypatch, "--check", "a.lock")
    assert (absent.returncode, "a.lock does not exist" in absent.stderr) == (2, True)


def test_a_config_is_not_overwritten_and_an_older_lock_is(folder, monkeypatch):
    before = (folder / "engine.json").read_bytes()
    refused = lock(folder, monkeypatch, "engine.json", "--out", "engine.json")
    assert (refused.returncode, "exists and is no lock" in refused.stderr) == (2, True)
    assert (folder / "engine.json").read_bytes() == before
    assert [lock(folder, monkeypatch, "engine.json").returncode for _ in range(2)] == [0, 0]


def test_local_parts_are_compared_without_a_config_where_they_are_found(folder, monkeypatch):
    (folder / "parts").mkdir()
    (folder / "parts" / "near.py").write_text(SINK)
    (folder / "far.py").write_text(SINK)
    config = json.loads((folder / "engine.json").read_text()) | {"telemetry": ["./parts/near.py:Sink", "far:Sink"]}
    (folder / "engine.json").write_text(json.dumps(config))
    assert lock(folder, monkeypatch, "engine.json").returncode == 0
    equal = lock(folder, monkeypatch, "--check", "dovetail.lock")
    assert (equal.returncode, "; 1 model not compared" in equal.stdout) == (0, True)

    for index, name in enumerate(["parts/near.py", "far.py"]):
        (folder / name).write_text(f"{SINK}# edited\n")
        edited = lock(folder, monkeypatch, "--check", "dovetail.lock")
        expected = f"part telemetry.{index}: other files: {Path(name).name}\nnot equal\n"
        assert (edited.returncode, edited.stdout) == (1, expected)
        (folder / name).unlink()
        gone = lock(folder, monkeypatch, "--check", "dovetail.lock")
        parts = "1 part" if index == 0 else "2 parts"
        assert (gone.returncode, f"; {parts} and 1 model not compared: name the config" in gone.stdout) == (0, True)
