"""Experiments on live traffic: who gets which arm, and that the engine does as the arm says."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail import LLM, LLMEngine, SamplingParams
from dovetail.contracts.engine_client import EngineFacts
from dovetail.contracts.errors import RequestError
from dovetail.contracts.telemetry import ArmDescription, ExperimentDescription
from dovetail.engine.experiments import Experiments

FACTS = EngineFacts(
    model="m",
    max_model_len=64,
    vocab_size=100,
    eos_token_ids=(),
    max_logprobs=5,
    max_completions=8,
    scheduler="fcfs",
    has_priorities=False,
    drafters=("lookup",),
    acceptance="rejection",
)
PARAMS = SamplingParams()
NUM_UNITS = 20_000


def experiment(*shares: float, **changes: Any) -> ExperimentDescription:
    arms = [ArmDescription(name=f"arm{i}", share=share, drafter=None) for i, share in enumerate(shares)]
    made = ExperimentDescription(name="e", arms=tuple(arms), unit="request", slice_s=60.0, traffic=1.0, seed=0)
    return replace(made, **changes)


def arm_of(experiments: Experiments, request_id: str, user: str | None = None) -> str | None:
    chosen = experiments.choose(request_id, PARAMS, user)
    return None if chosen is None else f"{chosen.experiment.name}/{chosen.arm.name}"


def is_fair(counts: Counter[Any], expected: dict[Any, float]) -> bool:
    """A chi-square test of counts at about 1e-4, by Wilson and Hilferty's approximation."""
    total, degrees = counts.total(), len(expected) - 1
    chi_square = sum((counts[key] - total * share) ** 2 / (total * share) for key, share in expected.items())
    deviation = ((chi_square / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return counts.keys() <= expected.keys() and deviation < 3.7


@pytest.mark.parametrize("seed", [0, 1, 7])
@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.1, 0.2, 0.7)])
def test_shares_are_kept(seed: int, shares: tuple[float, ...]) -> None:
    experiments = Experiments([experiment(*shares, seed=seed)], FACTS)
    counts = Counter(arm_of(experiments, f"cmpl-{number}-0") for number in range(NUM_UNITS))
    assert is_fair(counts, {f"e/arm{i}": share for i, share in enumerate(shares)})


def test_traffic_is_divided_and_arms_do_not_depend_on_it() -> None:
    both = [experiment(0.5, 0.5, traffic=0.3), experiment(0.5, 0.5, traffic=0.2, name="f")]
    counts = Counter(arm_of(Experiments(both, FACTS), str(number)) for number in range(NUM_UNITS))
    parts = {"e/arm0": 0.15, "e/arm1": 0.15, "f/arm0": 0.1, "f/arm1": 0.1, None: 0.5}
    assert is_fair(counts, parts)
    more = Experiments([experiment(0.5, 0.5, traffic=0.6)], FACTS)
    less = Experiments(both[:1], FACTS)
    for number in range(2000):
        was = arm_of(less, str(number))
        assert was in (None, arm_of(more, str(number))), "more traffic moves nobody"


def test_experiments_draw_arms_independently() -> None:
    """Two experiments, one after the other, on the same users: an arm of one says nothing of that of the next."""
    first, second = (Experiments([experiment(0.5, 0.5, name=name)], FACTS) for name in ("e", "f"))
    keys = [str(number) for number in range(NUM_UNITS)]
    counts = Counter((arm_of(first, key), arm_of(second, key)) for key in keys)
    assert is_fair(counts, {(f"e/arm{i}", f"f/arm{j}"): 0.25 for i in (0, 1) for j in (0, 1)})


@given(user=st.text(min_size=1), requests=st.lists(st.text(min_size=1), min_size=1, max_size=5))
def test_a_user_keeps_an_arm_and_a_pseudonym(user: str, requests: list[str]) -> None:
    made = experiment(0.5, 0.5, unit="user")
    engines = [Experiments([made], FACTS, clock) for clock in (lambda: 0.0, lambda: 1e9)]
    chosen = [engine.choose(request, PARAMS, user) for engine in engines for request in requests]
    assert len({(one.arm.name, one.unit_hash) for one in chosen if one is not None}) == 1
    assert all(one is not None and one.unit_hash not in (user, "") and one.slice is None for one in chosen)


def test_a_slice_has_one_arm_and_slices_differ() -> None:
    now = [0.0]
    experiments = Experiments([experiment(0.5, 0.5, unit="slice", slice_s=10.0)], FACTS, lambda: now[0])
    counts: Counter[str] = Counter()
    for number in range(4000):
        arms = set()
        for second in (0.0, 4.0, 9.99):
            now[0] = 10.0 * number + second
            chosen = experiments.choose(f"{now[0]}", PARAMS, None)
            assert chosen is not None
            assert chosen.slice == number
            arms.add(f"e/{chosen.arm.name}")
        assert len(arms) == 1
        counts.update(arms)
    assert is_fair(counts, {"e/arm0": 0.5, "e/arm1": 0.5})


def test_who_says_what_it_wants_takes_no_part() -> None:
    experiments = Experiments([experiment(0.5, 0.5)], FACTS)
    for speculation in ("off", "lookup"):
        assert experiments.choose("r", SamplingParams(speculation=speculation), None) is None
    assert experiments.choose("r", PARAMS, None) is not None


def test_without_a_user_nobody_is_drawn_by_user() -> None:
    assert Experiments([experiment(0.5, 0.5, unit="user")], FACTS).choose("r", PARAMS, None) is None


def test_requests_that_one_arm_refuses_take_no_part() -> None:
    """They would be in the other arm alone."""
    drafting = ArmDescription(name="lookup", share=0.5, drafter="lookup")
    made = experiment(0.5, 0.5)
    greedy_only = replace(FACTS, accepts_sampling=False)
    with_drafts = replace(made, arms=(made.arms[0], drafting))
    for number in range(20):
        assert Experiments([with_drafts], greedy_only).choose(str(number), PARAMS, None) is None
    assert Experiments([with_drafts], greedy_only).choose("r", SamplingParams(temperature=0), None) is not None
    assert Experiments([made], greedy_only).choose("r", PARAMS, None) is not None


EXPERIMENT = {"arms": {"plain": {"speculation": "off"}, "lookup": {"speculation": "lookup"}}, "unit": "user"}
REPEATING = [5, 6, 7, 8] * 6


@pytest.fixture
def engine(make_llm: Callable[..., LLM], tmp_path: Path) -> LLMEngine:
    drafter = {"name": "ngram", "num_tokens": 3, "min_match": 1, "length": "fixed"}
    return make_llm(
        speculative={"drafters": {"lookup": drafter}, "default": "lookup"},
        experiments={"drafts": EXPERIMENT},
        telemetry=["prometheus", {"name": "experiments", "path": str(tmp_path / "arms.jsonl")}],
    ).engine


def finish(engine: LLMEngine) -> dict[str, Any]:
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update({output.request_id: output for output in engine.step() if output.finished})
    return outputs


def records(file: Path, event: str = "request") -> list[dict[str, Any]]:
    return [line for line in map(json.loads, file.read_text().splitlines()) if line["event"] == event]


def test_an_engine_does_as_the_arm_says_and_tells_of_it(engine: LLMEngine, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0)
    for number in range(12):
        engine.add_request(f"r{number}", REPEATING, params, user=f"user-{number % 6}")
    engine.add_request("unknown", REPEATING, params)
    engine.add_request("salted", REPEATING, params, cache_salt="tenant")
    engine.add_request("decided", REPEATING, replace(params, speculation="off"), user="user-0")
    outputs = finish(engine)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs.values()}) == 1
    exposition = engine.metrics().body.decode()
    engine.shutdown()
    (design,) = records(tmp_path / "arms.jsonl", "experiment")
    found = records(tmp_path / "arms.jsonl")
    assert len(found) == 13, "the twelve of users, and the one of a tenant"
    assert {record["design"] for record in found} == {design["design"]}
    by_arm = Counter(record["arm"] for record in found)
    assert set(by_arm) == {"plain", "lookup"}
    by_unit: dict[str, set[str]] = {}
    for record in found:
        by_unit.setdefault(record["unit"], set()).add(record["arm"])
        drafts = record["arm"] == "lookup"
        assert record["drafter"] == ("lookup" if drafts else None)
        assert (record["drafted"] > 0) is drafts
        assert (record["output_tokens"], record["prompt_tokens"]) == (16, len(REPEATING))
        assert 0 <= record["queue"] <= record["ttft"] <= record["e2e"]
    assert len(by_unit) == 7
    assert all(len(arms) == 1 for arms in by_unit.values())
    total = sum(output.metrics.num_drafted for output in outputs.values())
    assert sum(record["drafted"] for record in found) + outputs["unknown"].metrics.num_drafted == total
    assert outputs["decided"].metrics.drafter is None
    for arm, count in by_arm.items():
        assert any(
            line.startswith("vllm:e2e_request_latency_seconds_count") and f'arm="{arm}"' in line
            for line in exposition.splitlines()
            if line.endswith(f" {count}")
        )
    assert "user-" not in (tmp_path / "arms.jsonl").read_text()


def test_others_are_those_of_other_arms(engine: LLMEngine, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for number in range(8):
        engine.add_request(f"r{number}", [5, 6], params, user=f"user-{number}")
    engine.abort_request("r0")
    engine.add_request("r8", [5, 6], params, user="user-0")
    finish(engine)
    engine.add_request("r9", [5, 6], params, user="user-0")
    finish(engine)
    engine.shutdown()
    found = records(tmp_path / "arms.jsonl")
    assert found[0]["finish_reason"] == "abort"
    last, after_abort = found[-1], next(record for record in found[1:] if record["unit"] == found[0]["unit"])
    running = [record["arm"] for record in found if record not in (found[0], last, after_abort)]
    assert len(running) == 7
    assert after_abort["num_others"] == sum(arm != after_abort["arm"] for arm in running)
    assert (last["num_others"], last["num_running"]) == (0, 0)


def test_a_user_is_text(engine: LLMEngine) -> None:
    with pytest.raises(RequestError, match="user must be text, got 7"):
        engine.add_request("r", [5, 6], user=7)  # type: ignore[arg-type]
