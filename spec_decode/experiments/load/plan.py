"""What an open-loop load sends, and when: drawn once, and the same in every arm and repetition.

So arms are compared on the same prompts at the same times (common random numbers), and what a segment's requests and
arrivals cost drops out of their ratios.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.commands.arrivals import TracedRequest, draw_arrivals, read_trace
from dovetail.commands.checks import require
from dovetail.spec_decode.experiments.run import TokenIds, Workload
from dovetail.spec_decode.experiments.schema import Experiment, LoadSection

_SHAPES = {"poisson": 1.0, "constant": math.inf}


@dataclass(frozen=True)
class Arrival:
    """One request of a segment."""

    time: float
    """Seconds from the segment's start."""
    place: int
    """Of its prompt in the workload."""
    token_ids: TokenIds
    max_tokens: int | None
    """Exactly so many tokens; None: as `sampling` says."""


@dataclass(frozen=True)
class LoadPoint:
    """One rate, or a trace at one speed."""

    name: str
    rate: float
    """Requests per second that arrive; of a trace, its mean."""
    segments: Sequence[Sequence[Arrival]]


def read_load_trace(experiment: Experiment, folder: Path) -> list[TracedRequest]:
    """The trace of an experiment's load, at its own speed; none where it has none. Raises `ConfigError` for a file that
    cannot be used."""
    load = experiment.load
    if load is None or load.trace is None:
        return []
    trace = read_trace(folder / load.trace, option="load.trace", in_order=True)
    require(
        len(trace) >= load.requests,
        f"load.trace {load.trace} has {len(trace)} requests, fewer than one segment: lower load.requests",
    )
    return trace


def foretell_load(load: LoadSection, trace: Sequence[TracedRequest], turns: int) -> str:
    """What a load takes, for people who plan one; `turns`: arms and lengths times repetitions."""
    count = min(load.segments, len(trace) // load.requests) if trace else load.segments
    if trace:
        starts = [trace[n * load.requests : (n + 1) * load.requests] for n in range(count)]
        spans = [sum(own[-1].arrival - own[0].arrival for own in starts) / speed for speed in load.speeds]
    else:
        spans = [count * (load.requests - 1) / rate for rate in load.rates]
    return (
        f"load: {count * len(spans) * turns} segments of {load.requests} requests, which arrive within"
        f" {turns * sum(spans):.0f} s in all; each segment lasts until its last request is served"
    )


def plan_load(
    experiment: Experiment, workload: Workload, trace: Sequence[TracedRequest], max_model_len: int
) -> list[LoadPoint]:
    """The points of an experiment's load, none without one. Raises `ConfigError` where a trace's requests do not fit
    the model, unless these are left out."""
    load = experiment.load
    if load is None:
        return []
    if load.trace is not None:
        return _traced(experiment, load, workload, trace, max_model_len)
    order = _order(len(workload.prompts), experiment.seed)
    return [
        LoadPoint(
            f"{rate:g}/s",
            rate,
            [
                [
                    Arrival(time, place, workload.token_ids[place], None)
                    for time, place in zip(_times(experiment.seed, load, rate, segment), places, strict=True)
                ]
                for segment, places in enumerate(_cut(order, load.requests, load.segments))
            ],
        )
        for rate in load.rates
    ]


def _times(seed: int, load: LoadSection, rate: float, segment: int) -> list[float]:
    """At another rate the same gaps, longer or shorter."""
    shape = load.burstiness if load.burstiness is not None else _SHAPES[load.arrivals]
    return draw_arrivals(load.requests, rate, shape, seed * 1_000_003 + segment)


def _order(num_prompts: int, seed: int) -> list[int]:
    places = list(range(num_prompts))
    random.Random(seed).shuffle(places)
    return places


def _cut(order: Sequence[int], size: int, count: int) -> list[list[int]]:
    """The places of each segment, from the beginning again where prompts are too few."""
    return [[order[(segment * size + i) % len(order)] for i in range(size)] for segment in range(count)]


def _traced(
    experiment: Experiment, load: LoadSection, workload: Workload, trace: Sequence[TracedRequest], max_model_len: int
) -> list[LoadPoint]:
    fitting = [one for one in trace if one.input_tokens + one.output_tokens < max_model_len]
    require(
        len(fitting) == len(trace) or experiment.workload.skip_too_long,
        f"load.trace: {len(trace) - len(fitting)} of {len(trace)} requests exceed max_model_len {max_model_len}: raise"
        " it, or set workload.skip_too_long, which leaves them out",
    )
    count = min(load.segments, len(fitting) // load.requests)
    require(
        count > 0,
        f"load.trace: {len(fitting)} requests fit max_model_len {max_model_len}, fewer than one segment",
    )
    order = _order(len(workload.prompts), experiment.seed)
    places = _cut(order, load.requests, count)
    points = []
    for speed in load.speeds:
        segments = [
            _traced_segment(fitting[n * load.requests : (n + 1) * load.requests], places[n], workload, speed)
            for n in range(count)
        ]
        spans = sum(segment[-1].time for segment in segments)
        rate = sum(len(segment) - 1 for segment in segments) / spans if spans else math.inf
        require(math.isfinite(rate), "load.trace: all requests of a segment arrive at once; a batch size measures that")
        points.append(LoadPoint(f"trace x{speed:g}", rate, segments))
    return points


def _traced_segment(
    requests: Sequence[TracedRequest], places: Sequence[int], workload: Workload, speed: float
) -> list[Arrival]:
    start = requests[0].arrival
    return [
        Arrival(
            (request.arrival - start) / speed,
            place,
            prompt_of_length(workload.token_ids, place, request.input_tokens),
            request.output_tokens,
        )
        for request, place in zip(requests, places, strict=True)
    ]


def prompt_of_length(prompts: Sequence[TokenIds], place: int, length: int) -> TokenIds:
    """A prompt of so many tokens that ends as the data set's does: its last tokens, behind as many of the prompts
    before it in the data set (from the end again) as are needed. Real text: of random tokens, drafts are accepted
    otherwise."""
    parts: list[TokenIds] = []
    missing = length
    while missing > 0:
        parts.append(prompts[place][-missing:])
        missing -= len(parts[-1])
        place = (place - 1) % len(prompts)
    return [token for part in reversed(parts) for token in part]
