"""Percentiles, intervals and what is computed from token times."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.contracts.errors import ConfigError
from dovetail.plugins.commands.bench.slo import ServiceLevels
from dovetail.plugins.commands.bench.stats import (
    flatten,
    intervals_of,
    paired_ratio_of,
    percentile,
    ratio_of,
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
        ratio = ratio_of(a, b, "mean", resamples=400, seed=trial)
        assert ratio is not None
        assert ratio.interval is not None
        covered += ratio.interval[0] <= 1.3 <= ratio.interval[1]
    # Of 120 trials at 95%, fewer than 101 have a chance below 1e-5; the bootstrap of 40 covers a little less than 95%.
    assert covered >= 101


@pytest.mark.parametrize("statistic", ["mean", "median"])
@pytest.mark.parametrize("groups", [3, 5, 10])
@pytest.mark.parametrize("noise", ["normal", "lognormal"])
def test_equal_results_are_rarely_called_different(groups: int, statistic: str, noise: str) -> None:
    draw = random.Random(f"{groups} {statistic} {noise}")

    def results() -> list[list[float]]:
        if noise == "normal":
            return [[draw.gauss(1, 0.03)] for _ in range(groups)]
        return [[draw.lognormvariate(0, 0.3)] for _ in range(groups)]

    intervals = [ratio_of(results(), results(), statistic) for _ in range(2000)]
    wrong = sum(not low <= 1 <= high for low, high in (found.interval for found in intervals if found))
    # Of 2,000 at 5%, more than 140 have a chance below 1e-4.
    assert wrong <= 140


def test_few_repetitions_still_find_a_large_difference() -> None:
    ratio = ratio_of([[1.0], [1.01], [0.99]], [[1.3], [1.31], [1.29]], "median")
    assert ratio is not None
    assert ratio.interval is not None
    assert 1.2 < ratio.interval[0] < ratio.value < ratio.interval[1] < 1.4


def test_repetitions_that_are_all_alike_are_told_apart_and_zeros_are_not() -> None:
    same = ratio_of([[2.0]] * 3, [[3.0]] * 3, "mean")
    assert same is not None
    assert same.interval == pytest.approx((1.5, 1.5))
    zero = ratio_of([[2.0]] * 3, [[3.0], [0.0], [1.0]], "mean")
    assert zero is not None
    assert zero.interval is None


def test_samples_of_one_repetition_do_not_count_as_many() -> None:
    a = [[value] * 500 for value in (1.0, 1.4, 0.8)]
    b = [[value] * 500 for value in (1.1, 1.5, 0.9)]
    ratio = ratio_of(a, b, "mean")
    assert ratio is not None
    assert ratio.interval is not None
    assert ratio.interval[0] < 1 < ratio.interval[1]


def test_two_repetitions_have_no_interval_and_zero_no_ratio() -> None:
    ratio = ratio_of([[1.0], [2.0]], [[1.0]] * 5, "median")
    assert ratio is not None
    assert ratio.interval is None
    assert ratio_of([[0.0]] * 3, [[1.0]] * 3, "median") is None


def test_an_interval_covers_the_true_value_about_as_often_as_it_says() -> None:
    for groups, least in ((5, 180), (40, 176)):
        draw = random.Random(groups)
        covered = 0
        for trial in range(200):
            samples = [[draw.lognormvariate(0, 0.1) for _ in range(3)] for _ in range(groups)]
            interval = intervals_of(samples, ["mean"], resamples=300, seed=trial)["mean"]
            assert interval is not None
            covered += interval[0] <= math.exp(0.005) <= interval[1]
        # Of 200 at 95%, fewer than 180 have a chance below 1e-2 and fewer than 176 below 1e-4.
        assert covered >= least


def test_intervals_are_of_whole_groups_and_need_three() -> None:
    groups = [[value] * 400 for value in (1.0, 1.4, 0.8)]
    found = intervals_of(groups, ["mean", "median"])
    assert found["mean"] is not None
    assert found["mean"][0] < 0.8
    assert found["mean"][1] > 1.3
    assert intervals_of(groups[:2], ["mean", "p90"]) == {"mean": None, "p90": None}
    assert intervals_of([[0.0], [1.0], [1.0]], ["mean"]) == {"mean": None}


@given(st.lists(st.lists(st.floats(1, 100), min_size=1, max_size=4), min_size=30, max_size=33), st.integers(0, 99))
def test_many_pairs_are_drawn_together(groups: list[list[float]], seed: int) -> None:
    """The interval of ratios, computed the long way with the same draws."""
    others = [[value * (1 + index % 3) for value in group] for index, group in enumerate(groups)]
    found = paired_ratio_of(groups, others, "median", resamples=20, seed=seed)
    generator = np.random.default_rng(seed)
    ratios = []
    for _ in range(20):
        drawn = generator.integers(0, len(groups), len(groups))
        top, bottom = ([side[index] for index in drawn] for side in (others, groups))
        ratios.append(statistic_of(flatten(top), "median") / statistic_of(flatten(bottom), "median"))
    assert found is not None
    assert found.interval == pytest.approx(np.quantile(ratios, [0.025, 0.975]))


def test_what_both_of_a_pair_share_drops_out_of_the_interval() -> None:
    draw = random.Random(2)
    for count in (8, 60):
        shared = [draw.lognormvariate(0, 1.0) for _ in range(count)]
        a = [[level * draw.lognormvariate(0, 0.02)] for level in shared]
        b = [[1.1 * level * draw.lognormvariate(0, 0.02)] for level in shared]
        paired, alone = paired_ratio_of(a, b, "mean"), ratio_of(a, b, "mean")
        assert paired is not None
        assert paired.interval is not None
        assert 1.0 < paired.interval[0] < 1.1 < paired.interval[1] < 1.2
        assert alone is not None
        assert alone.interval is not None
        assert alone.interval[0] < 1.0 < alone.interval[1]


def test_a_pair_with_an_empty_side_is_left_out() -> None:
    a, b = [[1.0], [2.0], [], [4.0], [3.0]], [[2.0], [], [6.0], [8.0], [6.0]]
    found = paired_ratio_of(a, b, "mean")
    assert found is not None
    assert found.value == pytest.approx(2.0)
    assert found.interval == pytest.approx((2.0, 2.0))
    assert paired_ratio_of([[]], [[1.0]], "mean") is None
    two = paired_ratio_of(a[:2], b[:2], "mean")
    assert two is not None
    assert two.interval is None


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


def test_the_servers_count_goes_before_the_number_of_chunks() -> None:
    one = RequestTimes("w", 0, 0.0, 0.0, None, 5, 0, [1.0, 2.0, 3.0], counted_tokens=6)
    assert one.num_tokens == 6
    assert one.tpot == pytest.approx(2.0 / 5)
    assert len(one.gaps) == 2


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
