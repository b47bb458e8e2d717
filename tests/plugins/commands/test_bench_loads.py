"""What is sent, and when."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.commands.arrivals import TracedRequest, draw_arrivals, parse_rate, read_trace
from dovetail.contracts.errors import ConfigError
from dovetail.plugins.commands.bench.corpus import prose
from dovetail.plugins.commands.bench.selection import SizeOptions, choose_load, sized_workload
from dovetail.plugins.commands.bench.workloads import NAMED, create_load, cut_prompts, find_workload, trace_prompts

CORPUS = list(prose().encode())
NO_SIZES = SizeOptions(None, None, None, None)


@pytest.mark.parametrize("name", NAMED)
def test_named_workloads_have_their_sizes_and_repeat(name: str) -> None:
    workload = find_workload(name)
    load = create_load(workload, CORPUS)
    assert [len(prompt) for prompt in load.prompts] == [workload.prompt_tokens] * workload.num_requests
    assert list(load.output_tokens) == [workload.output_tokens] * workload.num_requests
    assert create_load(workload, CORPUS) == load
    assert create_load(workload, CORPUS, seed=1) != load


def test_requests_share_what_the_workload_says_and_no_more() -> None:
    load = create_load(NAMED["shared-prefix-64"], CORPUS)
    assert len({tuple(prompt[:512]) for prompt in load.prompts}) == 1
    assert len({tuple(prompt[512:]) for prompt in load.prompts}) == 64
    own = create_load(NAMED["batch-32"], CORPUS)
    assert len({tuple(prompt[:16]) for prompt in own.prompts}) == 32


@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.integers(0, 5))
def test_prompts_are_cut_to_length_even_of_a_short_text(lengths: list[int], seed: int) -> None:
    corpus = [7, 8, 9, 10, 11]
    prompts = cut_prompts(lengths, corpus, seed)
    assert [len(prompt) for prompt in prompts] == lengths
    assert {token for prompt in prompts for token in prompt} <= set(corpus)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_spread_that_were_asked_for(burstiness: float) -> None:
    count, rate = 20_000, 8.0
    arrivals = draw_arrivals(count, rate, burstiness, seed=3)
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean
    # Five standard errors of the mean; the spread's own error is at most 3% for these shapes.
    assert mean == pytest.approx(1 / rate, rel=5 * burstiness**-0.5 / math.sqrt(count))
    assert spread == pytest.approx(burstiness**-0.5, rel=0.1)


def test_gaps_of_burstiness_one_are_exponential() -> None:
    """Kolmogorov and Smirnov's distance to the exponential distribution, against its 0.1% limit."""
    arrivals = draw_arrivals(5001, 2.0, seed=5)
    gaps = sorted(later - earlier for earlier, later in pairwise(arrivals))
    expected = [1 - math.exp(-2.0 * gap) for gap in gaps]
    distance = max(abs(value - (index + 0.5) / 5000) for index, value in enumerate(expected)) + 0.5 / 5000
    assert distance < 1.95 / math.sqrt(5000)


@given(st.integers(1, 50), st.floats(0.01, 1e4), st.floats(0.1, 10), st.integers(0, 9))
def test_arrivals_begin_at_zero_never_go_back_and_repeat(count: int, rate: float, shape: float, seed: int) -> None:
    arrivals = draw_arrivals(count, rate, shape, seed)
    assert len(arrivals) == count
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)
    assert arrivals == draw_arrivals(count, rate, shape, seed)


def test_an_infinite_rate_is_all_at_once() -> None:
    assert draw_arrivals(3, parse_rate("inf")) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "fast", "-inf"])
def test_rates_that_cannot_be_are_refused(rate: str) -> None:
    with pytest.raises(ConfigError, match="--rate"):
        parse_rate(rate)


def test_azures_traces_are_read(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,0\n"
    )
    first, second = read_trace(file, speed=2.0)
    assert (first.arrival, first.input_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.arrival == pytest.approx(4.314579 / 2, abs=1e-5)
    assert second.output_tokens == 1


def test_json_traces_are_sorted_and_cut(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [{"arrival": at, "input_tokens": 5, "output_tokens": 2} for at in (9.0, 7.5, 8.0)]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert [request.arrival for request in read_trace(file, limit=2)] == [0.0, 0.5]


MOONCAKE = [
    {"timestamp": 3000, "input_length": 1030, "output_length": 6, "hash_ids": [4, 5, 6]},
    {"timestamp": 1500, "input_length": 512, "output_length": 9, "hash_ids": [4]},
]


def test_mooncakes_traces_are_in_milliseconds_and_name_their_blocks(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.jsonl"
    file.write_text("\n".join(map(json.dumps, MOONCAKE)))
    first, second = read_trace(file)
    assert (first.arrival, first.input_tokens, first.output_tokens, first.blocks) == (0.0, 512, 9, (4,))
    assert (second.arrival, second.blocks) == (1.5, (4, 5, 6))


def test_blocks_of_a_trace_with_one_id_have_the_same_tokens(tmp_path: Path) -> None:
    requests = [
        TracedRequest(0.0, 1030, 1, (4, 5, 6)),
        TracedRequest(0.0, 700, 1, (4, 5)),
        TracedRequest(0.0, 1024, 1, (7, 5)),
        TracedRequest(0.0, 20, 1),
    ]
    prompts = trace_prompts(requests, [1, 2, 3], seed=0)
    assert [len(prompt) for prompt in prompts] == [1030, 700, 1024, 20]
    assert prompts[0][:700] == prompts[1]
    assert prompts[0][512:1024] == prompts[2][512:]
    assert prompts[0][:512] != prompts[2][:512]
    assert trace_prompts(requests, [1, 2, 3], seed=0) == prompts


def test_blocks_that_do_not_fit_the_length_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.jsonl"
    file.write_text(json.dumps(MOONCAKE[1] | {"input_length": 513}))
    with pytest.raises(ConfigError, match="hash_ids must be 2 integers"):
        read_trace(file)


def test_equal_gaps_and_bursts_of_one_size() -> None:
    assert draw_arrivals(4, 10.0, math.inf) == pytest.approx([0.0, 0.1, 0.2, 0.3])
    arrivals = draw_arrivals(3000, 10.0, burst_size=3, seed=1)
    assert all(len({*arrivals[begin : begin + 3]}) == 1 for begin in range(0, 3000, 3))
    # 999 exponential gaps of mean 0.3: five standard errors.
    assert arrivals[-1] / 999 == pytest.approx(0.3, rel=5 / math.sqrt(999))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n", "no column arrival"),
        ("arrival,input_tokens,output_tokens\nsoon,1,2\n", ":2: the arrival 'soon'"),
        ("arrival,input_tokens,output_tokens\n0,many,2\n", ":2: 'many' is no number"),
        ("arrival,input_tokens,output_tokens\n0,-4,2\n", ":2: -4 input tokens"),
        ("", "has no requests"),
    ],
)
def test_broken_traces_are_refused_with_their_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_trace(file)


def test_an_unknown_workload_answers_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'batch-32'"):
        choose_load(["batch-23"], None, None, NO_SIZES, 0, [])


def test_options_that_say_different_things_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave out --input-len"):
        choose_load(["decode-1"], None, None, SizeOptions(None, 5, None, None), 0, [])
    with pytest.raises(ConfigError, match="keep one"):
        choose_load(["decode-1"], tmp_path / "x", None, NO_SIZES, 0, [])
    with pytest.raises(ConfigError, match="cannot be read"):
        choose_load([], tmp_path / "none.jsonl", None, NO_SIZES, 0, [])


@pytest.mark.parametrize("sizes", [(0, 8, 8, 0), (1, 0, 8, 0), (1, 8, 0, 0), (1, 8, 8, 8), (1, 8, 8, -1)])
def test_sizes_that_cannot_be_are_refused(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ConfigError):
        sized_workload(*sizes)
