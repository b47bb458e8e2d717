"""The report of an experiment on live traffic: as data, and as sections like those of offline reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from dovetail.commands import create_console, print_warning
from dovetail.commands.checks import nearest, require
from dovetail.spec_decode.experiments.acceptance import DEFINITIONS
from dovetail.spec_decode.experiments.bootstrap import Resampler
from dovetail.spec_decode.experiments.columns import plain
from dovetail.spec_decode.experiments.live.checks import find_warnings
from dovetail.spec_decode.experiments.live.compare import (
    METRICS,
    ArmTraffic,
    LiveAcceptance,
    LiveSpeed,
    by_arm,
    compare_speed,
    describe_acceptance,
    describe_arm,
)
from dovetail.spec_decode.experiments.live.records import Design, LiveTraffic
from dovetail.spec_decode.experiments.speed import PER_REQUEST
from dovetail.spec_decode.experiments.speed_section import ratio_cells, ratio_header, speed_value
from dovetail.spec_decode.experiments.tables import Section, TableData, format_estimate
from dovetail.spec_decode.experiments.terminal import print_sections, verdict_text

FORMAT = 1
_RATE, _ROUND = "rate (ratio of sums)", "round length"


@dataclass(frozen=True)
class LiveReport:
    """Everything that was found."""

    design: Design
    baseline: str
    begin: float
    """Arrival of the first request, and of the last; seconds since 1970."""
    end: float
    arms: Sequence[ArmTraffic]
    speed: Sequence[LiveSpeed]
    acceptance: Sequence[LiveAcceptance]
    warnings: Sequence[str]


def analyse(traffic: LiveTraffic, baseline: str | None = None, draws: int = 10_000) -> LiveReport:
    """Raises `ConfigError` for a baseline that is no arm."""
    configured = {arm.name: arm for arm in traffic.design.arms}
    if baseline is not None:
        require(baseline in configured, f"--baseline {baseline!r} is no arm; {nearest(baseline, configured)}")
    arms, resampler = by_arm(traffic, baseline), Resampler(traffic.design.seed, draws)
    times = [record.time for record in traffic.records]
    return LiveReport(
        design=traffic.design,
        baseline=next(iter(arms)),
        begin=min(times),
        end=max(times),
        arms=[describe_arm(configured[name], records) for name, records in arms.items()],
        speed=compare_speed(arms, resampler),
        acceptance=describe_acceptance(arms),
        warnings=find_warnings(traffic, arms, resampler),
    )


def live_json(report: LiveReport) -> str:
    """The text of a JSON file."""
    data = {"dovetail_ab_live": FORMAT, **plain(report), "design": report.design.model_dump(mode="json")}
    data["definitions"] = {"speed": dict(METRICS), "acceptance": {name: DEFINITIONS[name] for name in (_RATE, _ROUND)}}
    return json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n"


def print_live(report: LiveReport) -> None:
    """All sections, the warnings, and the verdict on each arm in one line."""
    console = create_console()
    print_sections(console, [_traffic_section(report), _speed_section(report), _acceptance_section(report)])
    for warning in report.warnings:
        print_warning(warning)
    for line in verdict_lines(report):
        console.print(line, markup=False, highlight=False)


def verdict_lines(report: LiveReport) -> list[str]:
    """One line per arm."""
    units = {arm.arm: arm.num_units for arm in report.arms}
    return [
        f"{speed.arm}: {verdict_text(speed.decision.verdict, speed.ratio)}, {units[speed.arm]} {report.design.unit}s"
        f" against {units[report.baseline]} of {report.baseline}"
        for speed in report.speed
        if speed.metric == PER_REQUEST
    ]


def _traffic_section(report: LiveReport) -> Section:
    units = f"{report.design.unit}s"
    header = ["arm", "drafter", "share", units, "requests", "not finished", *METRICS, "output tokens"]
    rows = [
        [
            arm.arm,
            arm.drafter or "off",
            f"{arm.share:.1%}",
            f"{arm.num_units:,}",
            f"{arm.num_requests:,}",
            f"{arm.num_unfinished:,}",
            *("-" if value is None else speed_value(value, metric) for metric, value in arm.medians.items()),
            "-" if arm.output_tokens is None else f"{arm.output_tokens:.1f}",
        ]
        for arm in report.arms
    ]
    begin, end = (f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S}" for time in (report.begin, report.end))
    slices = f" of {report.design.slice_s:g} s" if report.design.unit == "slice" else ""
    notes = [
        f"{begin} to {end} UTC; {units}{slices} were drawn, {report.design.traffic:.0%} of them. Times are medians over"
        " requests that came to their end, output tokens their mean. Tokens are not compared here: what an arm changes"
        " in them, an offline experiment shows.",
    ]
    return Section(f"1. Traffic of {report.design.name}", notes, [TableData(header, rows)])


def _speed_section(report: LiveReport) -> Section:
    header = ["arm", report.baseline, "arm's", *ratio_header("groups")]
    tables = []
    for metric in METRICS:
        rows = [
            [s.arm, speed_value(s.baseline, metric), speed_value(s.own, metric), *ratio_cells(s.ratio, s.decision)]
            for s in report.speed
            if s.metric == metric
        ]
        if rows:
            tables.append(TableData(header, rows, metric))
    notes = [
        f"Ratios of geometric means to {report.baseline}'s, more than 1 is better. Intervals: bootstrap-t over"
        f" {report.design.unit}s of both arms (groups; of more than 400 in an arm several are one). All ratios are one"
        " family for Holm's correction, half of it tokens per second; intervals are of the level at which a ratio was"
        " tested, and leave 1 out if and only if the verdict is faster or slower.",
    ]
    return Section("2. Speed", notes, tables)


def _acceptance_section(report: LiveReport) -> Section:
    header = ["arm", "drafted", "accepted", f"{_RATE} [95%]", f"{_ROUND} [95%]"]
    rows = [
        [
            item.arm,
            f"{item.drafted:,}",
            f"{item.accepted:,}",
            format_estimate(item.rate, "{:.3f}"),
            format_estimate(item.round_length, "{:.2f}"),
        ]
        for item in report.acceptance
    ]
    notes = [f"{name}: {DEFINITIONS[name]}" for name in (_RATE, _ROUND)] if rows else ["Nothing was drafted."]
    return Section("3. Acceptance", notes, [TableData(header, rows)] if rows else [])
