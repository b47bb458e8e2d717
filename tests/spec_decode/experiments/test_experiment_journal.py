"""The journal of a run: what a kill leaves, what goes on from it, and what is refused."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from dovetail.commands.machine import Span
from dovetail.contracts.errors import ConfigError
from dovetail.spec_decode.experiments.cli import app
from dovetail.spec_decode.experiments.journal import FinishedTurn, Journal, default_journal, open_journal
from dovetail.spec_decode.experiments.progress import TurnProgress
from dovetail.spec_decode.experiments.records import RequestRecord, StepRecord
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

# Kills its process, where the environment says at which proposal.
FATAL_DRAFTER = """
import os
import signal

from dovetail.spec_decode.suffix.drafter import SuffixDrafter


class Fatal(SuffixDrafter):
    proposals = 0

    def propose(self, batch):
        Fatal.proposals += 1
        if str(Fatal.proposals) == os.environ.get("KILLED_AT"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().propose(batch)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("journal")
    save_tiny_model(folder / "model", tiny_config("llama", vocab_size=64))
    (folder / "fatal.py").write_text(FATAL_DRAFTER)
    prompts = [[(a * b) % 60 + 1 for b in range(1, 6)] * 3 for a in range(1, 5)]
    (folder / "set.jsonl").write_text("\n".join(json.dumps({"prompt_token_ids": ids}) for ids in prompts))
    return folder


def write(folder: Path, **changes: Any) -> Path:
    """An experiment of 4 groups at batch 1 and 2 at batch 2, of three arms, twice: 36 turns."""
    config = {
        "model": {"path": "./model", "tokenizer_mode": "none", "dtype": "float32"},
        "cache": {"num_blocks": 100},
        "executor": {"threads": 1},
        "attention": "sdpa",
    }
    drafter = {"name": "./fatal.py:Fatal", "num_tokens": 2, "length": "fixed"}
    data = {
        "config": config,
        "arms": {"fatal": {"drafter": drafter}},
        "workload": {"data": "set.jsonl"},
        "sampling": {"max_tokens": 5, "ignore_eos": True},
        "grid": {"batch_sizes": [1, 2]},
        "repetitions": 2,
        "rerun_disturbed": 0,
        "warmup": 0,
        "compatibility": False,
    } | changes
    path = folder / "e.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def invoke(path: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, [str(path), *arguments])


def report(path: Path, *arguments: str) -> dict[str, Any]:
    found = invoke(path, "--json", str(path.with_suffix(".json")), *arguments)
    assert found.exit_code == 0, found.output + repr(found.exception)
    data: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
    return data


def turns(data: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What ran, with its tokens; in any order."""
    columns = [data["requests"][name] for name in ("arm", "length", "batch", "repetition", "group", "prompt")]
    return sorted(zip(*columns, data["requests"]["token_ids"], strict=True), key=repr)


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> list[tuple[Any, ...]]:
    return turns(report(write(folder), "--journal", str(folder / "whole.jsonl")))


def killed(path: Path, at: int, *arguments: str) -> int:
    """Runs in a process of its own that is killed at a proposal. Returns how many turns the journal has then."""
    command = [sys.executable, "-m", "dovetail", "ab", str(path), *arguments]
    ended = subprocess.run(command, env=os.environ | {"KILLED_AT": str(at)}, capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    return sum(b'"turn"' in line for line in default_journal(path).read_bytes().splitlines())


def test_a_run_that_is_killed_in_a_turn_loses_that_turn_alone(
    folder: Path, uninterrupted: list[tuple[Any, ...]]
) -> None:
    path = write(folder)
    default_journal(path).unlink(missing_ok=True)
    # A turn at batch 1 makes at most four proposals, so that this one is in the third turn of the drafter, or later.
    kept = killed(path, 9)
    assert 2 * 3 <= kept < 36
    before = default_journal(path).read_bytes()
    found = report(path, "--resume")
    assert turns(found) == uninterrupted
    assert default_journal(path).read_bytes().startswith(before), "what was there stays"
    assert found["provenance"]["extent"]["sessions"] == 2
    # Once more: nothing is left to run.
    assert turns(report(path, "--resume")) == uninterrupted


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@settings(max_examples=2, deadline=None, derandomize=True)
@given(kills=st.lists(st.integers(1, 40), min_size=2, max_size=4))
def test_any_number_of_kills_anywhere(folder: Path, uninterrupted: list[tuple[Any, ...]], kills: list[int]) -> None:
    path = write(folder)
    default_journal(path).unlink(missing_ok=True)
    kept = 0
    for at in kills:
        arguments = ["--resume"] if kept else []
        command = [sys.executable, "-m", "dovetail", "ab", str(path), *arguments]
        ended = subprocess.run(command, env=os.environ | {"KILLED_AT": str(at)}, capture_output=True, check=False)
        assert ended.returncode in (0, -signal.SIGKILL), ended.stderr.decode()
        if default_journal(path).exists():
            kept = sum(b'"turn"' in line for line in default_journal(path).read_bytes().splitlines())
    assert turns(report(path, *(["--resume"] if kept else []))) == uninterrupted


def test_a_time_limit_ends_the_run_at_a_whole_round_and_the_report_says_how_to_go_on(
    folder: Path, uninterrupted: list[tuple[Any, ...]]
) -> None:
    path = write(folder)
    default_journal(path).unlink(missing_ok=True)
    first = report(path, "--max-minutes", "1e-9")
    assert {(arm, batch) for arm, _, batch, *_ in turns(first)} == {
        (arm, 1) for arm in ("plain", "plain-again", "fatal")
    }
    assert len(turns(first)) == 3
    assert any("3 of 24 turns at batch 1, 0 of 12 turns at batch 2" in warning for warning in first["warnings"])
    second = report(path, "--resume", "--max-minutes", "1e-9")
    assert len(turns(second)) == 6
    assert turns(report(path, "--resume")) == uninterrupted


def test_tables_are_what_the_report_has(folder: Path) -> None:
    path, tables = write(folder, name="tables", repetitions=1), folder / "tables"
    tables.mkdir()
    found = report(path, "--journal", str(folder / "tables.jsonl"), "--csv", str(tables))
    rows = {
        name: list(csv.DictReader(io.StringIO((tables / f"{name}.csv").read_text())))
        for name in ("requests", "steps", "results")
    }
    columns = found["requests"]
    assert [row["arm"] for row in rows["requests"]] == columns["arm"]
    assert [float(row["e2e_s"]) for row in rows["requests"]] == [times[-1] for times in columns["times"]]
    assert [int(row["accepted"]) for row in rows["requests"]] == columns["accepted"]
    assert {row["length"] for row in rows["requests"] if row["arm"] == "plain"} == {""}
    steps = found["step_samples"]
    assert [float(row["total_ms"]) for row in rows["steps"]] == steps["total"]
    assert [row["label"] for row in rows["results"]] == [item["label"] for item in found["results"]]
    documented = (Path(__file__).parents[3] / "docs" / "experiments.md").read_text()
    for name in ("requests", "steps"):
        assert all(f"`{column}`" in documented for column in rows[name][0])
    # The same from the file, for reports that were written before.
    for name in rows:
        printed = CliRunner().invoke(app, ["table", str(path.with_suffix(".json")), "--table", name])
        assert printed.stdout == (tables / f"{name}.csv").read_text()
    refused = CliRunner().invoke(app, ["table", str(path.with_suffix(".json")), "--table", "request"])
    assert "did you mean 'requests'" in str(refused.exception)


def test_journals_of_something_else_are_refused_with_what_differs(folder: Path) -> None:
    path = write(folder)
    journal = folder / "other.jsonl"
    report(path, "--journal", str(journal), "--max-minutes", "1e-9")
    before = journal.read_bytes()

    def refusal(*arguments: str, **changes: Any) -> str:
        found = invoke(write(folder, **changes), "--journal", str(journal), *arguments)
        assert isinstance(found.exception, ConfigError), found.output
        assert journal.read_bytes() == before
        return str(found.exception)

    assert "has 3 turns already: --resume goes on with them" in refusal()
    sampling = {"max_tokens": 6, "ignore_eos": True}
    assert "experiment.sampling.max_tokens: 5 / 6" in refusal("--resume", sampling=sampling)
    assert "prompts.sha256" in refusal("--resume", workload={"data": "set.jsonl", "limit": 3})
    save_tiny_model(folder / "second", tiny_config("llama", vocab_size=64), seed=1)
    config = yaml.safe_load(path.read_text())["config"]
    second = config | {"model": config["model"] | {"path": "./second"}}
    assert "model.sampled_sha256" in refusal("--resume", config=second)
    assert "there is no journal" in str(invoke(path, "--resume", "--journal", str(folder / "none.jsonl")).exception)


def a_turn(group: int, text: str) -> FinishedTurn:
    """Texts of any kind may stand in categories and errors of drafters."""
    request = RequestRecord("a", 2, 1, 0, group, 0, text, [1, 2], [0.25, 0.5], 2, 1, [1, 0], "length", text, [1])
    step = StepRecord("a", 2, 1, 1.0, 0.1, 0.2, 0.3, 0.4, 0, 1, 0, 0, 1, 2)
    return FinishedTurn("a", 2, 1, 0, group, 0, [request], [step], Span("a", 0, 0.5, None, 0.25), None)


WRITTEN = [a_turn(0, "é\u2028\n\r"), FinishedTurn("b", None, 1, 0, 0, 1, [], [], failure="none"), a_turn(1, '"}\x85')]


def written(path: Path) -> list[int]:
    """Writes them, and returns where each ends."""
    ends = []
    with open_journal(path, {"a": 1}, resume=False) as journal:
        journal.begin("x")
        for turn in WRITTEN:
            journal.append(turn)
            ends.append(path.stat().st_size)
    return ends


@settings(max_examples=25, deadline=None)
@given(cut=st.floats(0, 1))
def test_a_journal_that_is_cut_anywhere_has_every_whole_turn_and_goes_on(cut: float) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "j.jsonl"
        ends = written(path)
        place = int(cut * ends[-1])
        path.write_bytes(path.read_bytes()[:place])
        whole = [turn for turn, end in zip(WRITTEN, ends, strict=True) if end <= place]
        with open_journal(path, {"a": 1}, resume=bool(whole)) as journal:
            assert list(journal.turns.values()) == whole
            journal.append(a_turn(2, ""))
        with open_journal(path, {"a": 1}, resume=True) as journal:
            assert list(journal.turns.values()) == [*whole, a_turn(2, "")]


def refuse(path: Path, *, resume: bool) -> str:
    with pytest.raises(ConfigError) as error, open_journal(path, {}, resume=resume):
        pass
    return str(error.value)


def test_files_that_are_no_journals_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    for text in ("mine", '{"a": 1}\n', "[1]\n", "x\ny\n"):
        for resume in (False, True):
            path.write_text(text)
            assert str(path) in refuse(path, resume=resume)
            assert path.read_text() == text


def test_a_damaged_line_and_a_second_process_are_told(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with open_journal(path, {}, resume=False) as journal:
        assert "another process writes this journal" in refuse(path, resume=True)
        journal.append(FinishedTurn("a", None, 1, 0, 0, 0))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + "{\n" + lines[1])
    assert ":2: no line of a journal" in refuse(path, resume=True)
    path.write_text(lines[0] + lines[1].replace('"batch"', '"bach"'))
    assert ":2: no turn as this version writes it" in refuse(path, resume=True)


def test_a_journal_without_turns_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"

    def fail(journal: Journal) -> None:
        journal.begin("x")
        raise ConfigError("no memory")

    with pytest.raises(ConfigError, match="no memory"), open_journal(path, {}, resume=False) as journal:
        fail(journal)
    assert not path.exists()


def test_lines_without_a_terminal_say_how_far_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 0.0, 10.0, 60.0, 70.0, 80.0])
    with TurnProgress(4, clock=lambda: next(times)) as progress:
        for number in range(4):
            progress.begin(f"what {number}")
    assert capfd.readouterr().err.splitlines() == [
        "turn 1 of 4, 0.0 minutes spent: what 0",
        "turn 3 of 4, 1.0 minutes spent, about 1.0 left: what 2",
        "4 turns in 1.3 minutes",
    ]
