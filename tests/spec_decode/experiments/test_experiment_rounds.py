"""Which rounds run and which count: disturbed ones again, and no more of what is decided."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from dovetail.commands.datasets import Prompt
from dovetail.commands.machine import NOISE_LIMIT, Span
from dovetail.contracts.errors import ConfigError
from dovetail.spec_decode.experiments import measuring, sampled_equality
from dovetail.spec_decode.experiments import run as run_module
from dovetail.spec_decode.experiments.arms import Variant
from dovetail.spec_decode.experiments.cli import app
from dovetail.spec_decode.experiments.journal import FinishedTurn, Journal, TurnKey
from dovetail.spec_decode.experiments.measuring import Course, Decide, Measured, TimeLimit, measure
from dovetail.spec_decode.experiments.records import RequestRecord
from dovetail.spec_decode.experiments.run import Bench, Workload
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL, parse_experiment
from dovetail.spec_decode.experiments.speed import PRIMARY, compare_speed
from dovetail.spec_decode.experiments.stopping import AlwaysValid, is_decided
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

ARMS = [Variant(BASELINE, None), Variant(CONTROL, None), Variant("a", 2)]


class ScriptedBench:
    """Engines whose turns take what a script says, on a machine that is as busy as it says: neither can be ordered."""

    variants = ARMS

    def __init__(self, **changes: Any):
        self.experiment = parse_experiment({"arms": {"a": {"drafter": "x"}}, "warmup": 0} | changes, "test")

    def forget_finished(self) -> None:
        """There is nothing to forget."""


def workload(prompts: int) -> Workload:
    return Workload([Prompt(index=index, origin="set") for index in range(prompts)], [[1]] * prompts, "raw", 0)


def run(
    monkeypatch: pytest.MonkeyPatch,
    bench: ScriptedBench,
    prompts: int,
    taken: Callable[[TurnKey], float],
    seconds: Callable[[TurnKey], float],
    decide: Decide | None = None,
) -> tuple[Journal, Measured]:
    def turn(_: object, __: object, batch: int, turn: Any, attempt: int) -> FinishedTurn:
        blank = FinishedTurn(turn.what.arm, turn.what.length, batch, turn.repetition, turn.group, attempt)
        times = [seconds(blank.key)] * 2
        requests = [
            RequestRecord(
                blank.arm, blank.length, batch, turn.repetition, turn.group, p, "c", [1, 2], times, 0, 0, [], ""
            )
            for p in turn.prompts
        ]
        span = Span("", 0, 1.0, taken(blank.key), 0.0)
        return FinishedTurn(*blank.key[4:], *blank.key[:4], requests, [], span)

    monkeypatch.setattr(measuring, "run_turn", turn)
    journal = Journal()
    course = Course(cast(Bench, bench), workload(prompts), journal, decide)
    measure(course, lambda _: None, TimeLimit(None))
    return journal, course.measured()


def again_takes(pace: float) -> Callable[[TurnKey], float]:
    """Seconds of turns: 1 the first time, `pace` when a round runs again."""
    return lambda key: pace if key[3] else 1.0


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), share=st.floats(0, 1), most=st.integers(0, 5))
def test_disturbed_rounds_run_again_once_as_a_whole_and_the_less_disturbed_time_counts(
    seed: int, share: float, most: int
) -> None:
    def taken(key: TurnKey) -> float:
        draw = np.random.default_rng([seed, *map(hash, key[:4]), len(key[4])])
        return float(draw.uniform(NOISE_LIMIT, 1)) if draw.random() < share / 3 else 0.0

    bench = ScriptedBench(repetitions=2, rerun_disturbed=most, grid={"batch_sizes": [1, 2]})
    counted = []
    for pace in (1.0, 3.0):
        with pytest.MonkeyPatch.context() as patch:
            journal, measured = run(patch, bench, 4, taken, again_takes(pace))
        rounds: dict[tuple[int, ...], dict[int, float]] = {}
        for *place, attempt, _, _ in journal.turns:
            rounds.setdefault(tuple(place), {}).setdefault(attempt, 0.0)
        for (*place, attempt, _, _), turn in journal.turns.items():
            assert turn.span is not None
            rounds[tuple(place)][attempt] = max(rounds[tuple(place)][attempt], turn.span.taken)
        assert len(rounds) == 2 * (4 + 2)
        by_repetition = Counter(place[:2] for place, times in rounds.items() for _ in range(len(times) - 1))
        assert all(count <= most for count in by_repetition.values())
        again = {place for place, times in rounds.items() if len(times) > 1}
        disturbed = {place for place, times in rounds.items() if times[0] > NOISE_LIMIT}
        assert again <= disturbed
        assert all(max(times) <= 1 for times in rounds.values())
        for repetition, count in Counter(place[:2] for place in disturbed).items():
            assert by_repetition[repetition] == min(count, most)
        # Each group once in each arm and repetition, whatever else is in the journal.
        found = Counter((r.batch, r.repetition, r.group, r.arm) for r in measured.requests)
        assert all(count == batch for (batch, *_), count in found.items())
        assert len(found) == len(rounds) * len(ARMS)
        least = max(min(times.values()) for times in rounds.values())
        assert max(span.taken for span in measured.spans) == least
        assert (measured.extent.disturbed, measured.extent.run_again) == (len(disturbed), sum(by_repetition.values()))
        counted.append(list(found))
    assert counted[0] == counted[1], "what was measured decides nothing"


def test_of_a_round_that_ran_again_no_arm_keeps_its_first_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(key: TurnKey) -> float:
        return 0.5 if key[2:5] == (1, 0, "a") else 0.0

    _, measured = run(monkeypatch, ScriptedBench(repetitions=1), 3, taken, again_takes(9.0))
    assert {(r.group, r.arm): r.e2e for r in measured.requests} == {
        (group, arm.arm): 9.0 if group == 1 else 1.0 for group in range(3) for arm in ARMS
    }


def paces(effect: float, seed: int) -> Callable[[TurnKey], float]:
    def seconds(key: TurnKey) -> float:
        noise = np.random.default_rng([seed, *key[:4], len(key[4])]).normal(0, 0.05)
        return float(np.exp(noise - (effect if key[4] == "a" else 0.0)))

    return seconds


def decide(requests: Any) -> bool:
    return is_decided(requests, 2)


def test_what_is_decided_runs_no_more_and_what_is_not_uses_up_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ScriptedBench(repetitions=1, grid={"batch_sizes": [1, 2]})
    _, clear = run(monkeypatch, bench, 60, lambda _: 0.0, paces(0.2, 0), decide)
    assert clear.extent.decided == [1, 2]
    assert all(5 * len(ARMS) <= turns < 20 * len(ARMS) for turns in clear.extent.measured.values())
    _, none = run(monkeypatch, bench, 60, lambda _: 0.0, paces(0.0, 0), decide)
    assert none.extent.decided == []
    assert none.extent.measured == {1: 60 * len(ARMS), 2: 30 * len(ARMS)}


@settings(max_examples=30, deadline=None)
@given(effect=st.floats(-0.2, 0.2), seed=st.integers(0, 999))
def test_a_run_that_ended_by_what_it_saw_is_decided_in_its_report(effect: float, seed: int) -> None:
    bench = ScriptedBench(repetitions=1, grid={"batch_sizes": [1, 2]})
    with pytest.MonkeyPatch.context() as patch:
        _, measured = run(patch, bench, 40, lambda _: 0.0, paces(effect, seed), decide)
    speeds = compare_speed(measured.requests, AlwaysValid(0)).ratios
    primary = {s.batch: s.verdict for s in speeds if s.metric == PRIMARY and s.arm == "a" and s.category is None}
    assert measured.extent.decided is not None
    for batch in measured.extent.decided:
        assert primary[batch] == ("faster" if effect > 0 else "slower") or abs(effect) < 0.05
        assert primary[batch] != "undecided"


SLOW_DRAFTER = """
import time

from dovetail.contracts.speculation import DraftWorker


class Slow(DraftWorker):
    contract = (1, 0)

    def propose(self, batch):
        time.sleep(0.02)
        return [None] * len(batch.requests)
"""


def test_until_decided_ends_a_real_run_before_its_prompts_are_used_up(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", tiny_config("llama", vocab_size=64))
    (tmp_path / "slow.py").write_text(SLOW_DRAFTER)
    (tmp_path / "set.jsonl").write_text("\n".join(json.dumps({"prompt_token_ids": [n, 2, 3]}) for n in range(1, 41)))
    data = {
        "config": {
            "model": {"path": "./model", "tokenizer_mode": "none", "dtype": "float32"},
            "cache": {"num_blocks": 100},
            "executor": {"threads": 1},
            "attention": "sdpa",
        },
        "arms": {"slow": {"drafter": {"name": "./slow.py:Slow", "num_tokens": 2, "length": "fixed"}}},
        "workload": {"data": "set.jsonl"},
        "sampling": {"max_tokens": 6, "ignore_eos": True},
        "compatibility": False,
    }
    path = tmp_path / "e.yaml"
    path.write_text(yaml.safe_dump(data))
    found = CliRunner().invoke(app, [str(path), "--until-decided", "--json", str(tmp_path / "r.json")])
    assert found.exit_code == 0, found.output + repr(found.exception)
    report = json.loads((tmp_path / "r.json").read_text())
    extent = report["provenance"]["extent"]
    assert extent["decided"] == [1]
    assert extent["measured"]["1"] < extent["planned"]["1"] == 40 * 3
    (row,) = report["results"]
    assert row["speedup.verdict"] == "slower"
    assert row["speedup.high"] < 1
    assert not any("was stopped" in warning for warning in report["warnings"])
    other = CliRunner().invoke(app, [str(path), "--resume"])
    assert isinstance(other.exception, ConfigError)
    assert "until_decided: True / False" in str(other.exception)


def sampled(folder: Path, prompts: int) -> Path:
    """An experiment with temperature, of so many prompts."""
    save_tiny_model(folder / "model", tiny_config("llama", vocab_size=64))
    lines = [json.dumps({"prompt_token_ids": [n, 2, 3, n, 2, 3]}) for n in range(1, prompts + 1)]
    (folder / "set.jsonl").write_text("\n".join(lines))
    data = {
        "config": {
            "model": {"path": "./model", "tokenizer_mode": "none", "dtype": "float32"},
            "cache": {"num_blocks": 100},
            "executor": {"threads": 1},
            "attention": "sdpa",
        },
        "arms": {"lookup": {"drafter": {"name": "ngram", "num_tokens": 2, "length": "fixed", "min_match": 1}}},
        "workload": {"data": "set.jsonl"},
        "sampling": {"max_tokens": 4, "ignore_eos": True, "temperature": 1.0},
        "repetitions": 2,
        "warmup": 0,
        "compatibility": False,
    }
    path = folder / "e.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def test_rules_are_watched_with_new_seeds_as_often_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed once, since until decided, and watched twice."""
    seeds: dict[str, set[tuple[int, ...]]] = {"timed": set(), "watched": set()}

    def noting(kept: set[tuple[int, ...]]) -> Callable[..., list[int]]:
        def request_seeds(*args: Any) -> list[int]:
            found = original(*args)
            kept.add(tuple(found))
            return found

        return request_seeds

    original = run_module.request_seeds
    monkeypatch.setattr(sampled_equality, "request_seeds", noting(seeds["watched"]))
    monkeypatch.setattr(run_module, "request_seeds", noting(seeds["timed"]))
    folder = tmp_path / "tables"
    found = CliRunner().invoke(app, [str(sampled(tmp_path, 6)), "--until-decided", "--csv", str(folder)])
    assert found.exit_code == 0, found.output + repr(found.exception)
    assert (len(seeds["timed"]), len(seeds["watched"])) == (6, 12)
    assert not seeds["timed"] & seeds["watched"]
    # The folder was not there.
    assert {path.name for path in folder.iterdir()} == {"requests.csv", "steps.csv", "results.csv"}


def test_until_decided_with_too_few_prompts_is_refused_before_engines_start(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, [str(sampled(tmp_path, 4)), "--until-decided"])
    assert isinstance(found.exception, ConfigError)
    assert "4 prompts make 4 groups at batch 1" in str(found.exception)
