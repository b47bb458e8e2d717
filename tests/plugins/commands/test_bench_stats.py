"""Percentiles, intervals and what is computed from token times."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.contracts.errors import ConfigError
from dovetail.plugins.commands.bench.slo import ServiceLevels
from dovetail.plugins.commands.bench.stats import (
    bootstrap_ratio,
    flatten,
    percentile,
    statistic_of,
    summarize,
)
from dovetail.plugins.commands.bench.timing import RequestTimes, decode_rate, prefill_rate

finite = st.floats(-1e6, 1e6, allow_nan=False)


def request(tokens: list[float], arrival: float = 0.0, prompt_tokens: int = 10) -> RequestTimes:
    return RequestTimes("w", 0, arrival, arrival, arrival, prompt_tokens, 0, tokens)


@given(st.lists(finite, min_size=1, max_size=60), st.floats(0, 100))
def test_percentiles_are_numpys(samples: list[float], q: float) -> None:
    assert percentile(samples, q) == pytest.approx(float(np.percentile(samples, q)), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(("count", "shown"), [(1, [50]), (10, [50, 90]), (20, [50, 90, 95]), (100, [50, 90, 95, 99])])
def test_percentiles_without_samples_beyond_are_not_reported(count: int, shown: list[int]) -> None:
    found = summarize(list(range(count))).percentiles
    assert [q for q, value in found.items() if value is not None] == shown


@given(st.lists(st.lists(st.floats(1, 100), min_size=1, max_size=8), min_size=3, max_size=6), st.integers(0, 99))
def test_a_weighted_draw_is_the_statistic_of_the_drawn_groups(groups: list[list[float]], seed: int) -> None:
    """One resample, computed the long way with the same draws."""
    from dovetail.plugins.commands.bench.stats import _resampled

    for statistic in ("mean", "median", "p90"):
        got = _resampled(groups, statistic, 3, np.random.default_rng(seed))
        generator = np.random.default_rng(seed)
        for value in got:
            drawn = [groups[index] for index in generator.integers(0, len(groups), len(groups))]
            assert value == pytest.approx(statistic_of(flatten(drawn), statistic))


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says() -> None:
    draw = random.Random(1)
    covered = 0
    for trial in range(120):
        a = [[draw.lognormvariate(0, 0.2)] for _ in range(40)]
        b = [[1.3 * draw.lognormvariate(0, 0.2)] for _ in range(40)]
        ratio = bootstrap_ratio(a, b, "mean", resamples=400, seed=trial)
        assert ratio is not None
        assert ratio.interval is not None
        covered += ratio.interval[0] <= 1.3 <= ratio.interval[1]
    # Of 120 trials at 95%, fewer than 101 have a chance below 1e-5; the bootstrap of 40 covers a little less than 95%.
    assert covered >= 101


def test_samples_of_one_repetition_do_not_count_as_many() -> None:
    a = [[value] * 500 for value in (1.0, 1.4, 0.8)]
    b = [[value] * 500 for value in (1.1, 1.5, 0.9)]
    ratio = bootstrap_ratio(a, b, "mean")
    assert ratio is not None
    assert ratio.interval is not None
    assert ratio.interval[0] < 1 < ratio.interval[1]


def test_two_repetitions_have_no_interval_and_zero_no_ratio() -> None:
    ratio = bootstrap_ratio([[1.0], [2.0]], [[1.0]] * 5, "median")
    assert ratio is not None
    assert ratio.interval is None
    assert bootstrap_ratio([[0.0]] * 3, [[1.0]] * 3, "median") is None


def test_times_of_a_request() -> None:
    one = request([1.5, 1.7, 1.7, 2.1], arrival=1.0)
    assert (one.ttft, one.e2e) == (0.5, pytest.approx(1.1))
    assert one.gaps == pytest.approx([0.2, 0.0, 0.4])
    assert one.tpot == pytest.approx(0.2)
    assert request([2.0]).tpot is None


@given(st.lists(st.floats(0, 10), min_size=2, max_size=20))
def test_gaps_sum_to_what_is_left_after_the_first_token(times: list[float]) -> None:
    one = request(sorted(times))
    assert sum(one.gaps) == pytest.approx(one.e2e - one.ttft)
    assert one.tpot == pytest.approx(sum(one.gaps) / len(one.gaps))


def test_rates_of_a_batch() -> None:
    batch = [request([1.0, 2.0, 3.0]), request([2.0, 3.0, 4.0])]
    assert prefill_rate(batch) == 10.0
    assert decode_rate(batch) == 1.5  # three tokens come in the two seconds after both have started
    assert decode_rate([request([1.0])]) is None


def test_service_levels_are_all_to_be_met() -> None:
    levels = ServiceLevels.parse(["ttft=500", "itl=300ms"])
    assert levels.are_met(request([0.5, 0.7]))
    assert not levels.are_met(request([0.6, 0.7]))
    assert not levels.are_met(request([0.5, 0.9]))
    assert levels.are_met(request([0.5]))


@pytest.mark.parametrize("given", ["tftt=5", "ttft", "ttft=-1", "ttft=soon", "e2e=inf"])
def test_bad_service_levels_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=given.split("=")[0]):
        ServiceLevels.parse([given])


def test_what_is_noted_survives_json() -> None:
    from dovetail.plugins.commands.bench.result import Metric, Result, write_json

    metric = Metric("s", "lower", "median", "d", [[1.0, 2.0], [3.0]])
    result = Result(
        kind="latency",
        date="2026-01-01",
        workloads={"w": {}},
        procedure={},
        metrics={"w/ttft": metric},
        requests=[request([1.0, 2.0])],
        environment={},
        config={},
    )
    text = write_json(result)
    again = Result.model_validate_json(text)
    assert again.metrics == result.metrics
    assert list(again.requests[0].tokens) == [1.0, 2.0]
    assert json.loads(text)["summaries"]["w/ttft"]["p50"] == 2.0
