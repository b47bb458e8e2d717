"""What the schedulers are for: shares, and who waits for whom."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from dovetail_fair_tenants.fair_queueing import FairQueueing
from dovetail_fair_tenants.fair_share import FairShare
from dovetail_fair_tenants.tenants import Tenants

from dovetail import LLM, SamplingParams
from dovetail.contracts.scheduler import RequestState, SchedulerLimits
from dovetail.testing.scheduler_simulation import SchedulerSimulation
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

BOTH = [FairShare, FairQueueing]


def simulate(kind: Any, **options: Any) -> SchedulerSimulation:
    """One request runs at a time."""
    limits = SchedulerLimits(max_num_batched_tokens=16, max_num_seqs=1, max_model_len=64)
    return SchedulerSimulation(kind(kind.Options(**options), limits), limits, num_blocks=200)


def order(simulation: SchedulerSimulation, key: str = "tenant") -> list[str]:
    """Tenants in the order in which their requests ended."""
    simulation.run()
    return [sequence.extra[key] for sequence in simulation.finished]


@pytest.mark.parametrize("kind", BOTH)
def test_a_tenant_with_many_requests_does_not_hold_up_one_with_few(kind: Any) -> None:
    simulation = simulate(kind, key="user")
    many, few = ({"user": name} for name in ("many", "few"))
    for extra in (many, many, many, many, few, few):
        simulation.add([1, 2], 4, sampling=SamplingParams(extra=extra))
    assert order(simulation, "user") == ["many", "few", "many", "few", "many", "many"]


@pytest.mark.parametrize("kind", BOTH)
def test_a_tenant_of_twice_the_weight_gets_twice_the_share(kind: Any) -> None:
    simulation = simulate(kind, weights={"heavy": 2})
    for tenant in [*["light"] * 6, *["heavy"] * 6]:
        simulation.add([1, 2], 4, sampling=SamplingParams(extra={"tenant": tenant}))
    finished = order(simulation)
    for count in (3, 6, 9):
        assert Counter(finished[:count]) == {"heavy": 2 * count // 3, "light": count // 3}
    assert finished[9:] == ["light"] * 3


@pytest.mark.parametrize("kind", BOTH)
def test_a_tenant_that_comes_back_has_no_credit(kind: Any) -> None:
    """Others were served while it was away; it shares from now on, and does not make up for the past."""
    simulation = simulate(kind)
    for _ in range(20):
        simulation.add([1, 2], 4, sampling=SamplingParams(extra={"tenant": "steady"}))
    while len(simulation.finished) < 8:
        simulation.step()
    for _ in range(6):
        simulation.add([1, 2], 4, sampling=SamplingParams(extra={"tenant": "late"}))
    next_ones = order(simulation)[8:18]
    assert 4 <= Counter(next_ones)["late"] <= 6


def stopped_early(kind: Any) -> list[str]:
    """Tenants in the order in which their requests ended; those of "short" are stopped at 2 of 40 tokens."""
    simulation, ended = simulate(kind), []
    for _ in range(12):
        for tenant, num_tokens in (("short", 40), ("exact", 2)):
            simulation.add([1, 2], num_tokens, sampling=SamplingParams(extra={"tenant": tenant}))
    while before := list(simulation.live):
        simulation.step()
        for sequence in list(simulation.live):
            if sequence.extra["tenant"] == "short" and sequence.num_tokens >= 4:
                simulation.abort(sequence)
        ended += [sequence.extra["tenant"] for sequence in before if sequence not in simulation.live]
    return ended


def test_fair_share_counts_what_requests_took_and_fair_queueing_what_they_may_take() -> None:
    assert Counter(stopped_early(FairShare)[:12])["short"] == 6
    assert Counter(stopped_early(FairQueueing)[:12])["short"] < 3


def test_a_step_looks_at_its_own_requests_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise who sends a thousand requests would hold up all others by the time that steps take."""
    looked_at: list[RequestState] = []
    name = Tenants.name

    def noted(tenants: Tenants, request: RequestState) -> str:
        looked_at.append(request)
        return name(tenants, request)

    monkeypatch.setattr(Tenants, "name", noted)
    counts = []
    for num_waiting in (5, 500):
        simulation = simulate(FairShare)
        for number in range(num_waiting):
            simulation.add([1, 2], 4, sampling=SamplingParams(extra={"tenant": number % 3}))
        looked_at.clear()
        for _ in range(4):
            simulation.step()
        counts.append(len(looked_at))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("weight", [0, -1])
@pytest.mark.parametrize("kind", BOTH)
def test_weights_that_share_nothing_are_refused(kind: Any, weight: float) -> None:
    with pytest.raises(ValueError, match="weights"):
        kind.Options(weights={"a": weight})


@pytest.mark.parametrize("name", ["fair_share", "fair_queueing"])
def test_an_engine_finds_it_by_its_name_and_gives_the_same_tokens(tmp_path: Path, name: str) -> None:
    """With too few blocks for all, so that requests are preempted."""
    save_tiny_model(tmp_path, tiny_config("llama"))
    sections: dict[str, Any] = {
        "model": {"path": str(tmp_path), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 48},
        "cache": {"block_size": 4, "num_blocks": 16},
        "executor": {"threads": 1},
    }
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, extra={"tenant": n % 2}) for n in (20, 9, 3)]
    prompts = [[3, 5, 7, 11, 13], [2, 4], [17] * 20]
    with LLM(**sections) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    with LLM(**sections, scheduler={"name": name, "weights": {"1": 3}}) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected
