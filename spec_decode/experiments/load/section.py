"""The section of an open-loop load: ratios to plain at each rate, and how each arm bore it."""

from __future__ import annotations

from dovetail.spec_decode.experiments.load.results import LOAD_METRICS, LoadReport, LoadSpeed, LoadState
from dovetail.spec_decode.experiments.report import Report
from dovetail.spec_decode.experiments.tables import Section, TableData, format_estimate


def load_sections(report: Report) -> list[Section]:
    """One section where the experiment has a load."""
    found = report.load
    if found is None:
        return []
    if not found.measured:
        return [Section("Open-loop load", [f"0 of {found.planned} segments were measured."], [])]
    short = {state.point: state.enough_requests for state in found.states if state.enough_requests is not None}
    notes = [
        *_notes(found, report.label(*found.baseline)),
        *(f"{point}: about {count} requests a segment would tell (load.requests)." for point, count in short.items()),
    ]
    return [Section("Open-loop load", notes, [_speed_table(report, found), _state_table(report, found)])]


def _notes(found: LoadReport, baseline: str) -> list[str]:
    notes = [
        f"Requests come at times of their own, the same in every arm. Ratios to {baseline} are paired by segments, more"
        " than 1 is better; all of this section are one family, Holm-corrected, and intervals agree with the verdicts. "
        + "; ".join(f"{name}: {text}" for name, text in LOAD_METRICS.items())
        + ".",
        "grows: share of the arriving requests that add to those under way for good, from the second quarter of a"
        " segment to its last. Where an arm is overloaded, its queue grows without end, and its times are those of a"
        " segment of this length, no others. too short: the first requests take longer than a quarter of a segment, so"
        " that a growing queue may be the start.",
    ]
    if found.slo_ms:
        limits = ", ".join(f"{name} up to {limit:g} ms" for name, limit in found.slo_ms.items())
        notes.append(
            f"goodput: share of requests with {limits} (itl: the request's mean); gain: that less {baseline}'s."
        )
    if found.measured < found.planned:
        notes.append(f"{found.measured} of {found.planned} segments were measured.")
    return notes


def _speed_table(report: Report, found: LoadReport) -> TableData:
    header = [
        "arm",
        "load",
        "metric",
        report.label(*found.baseline),
        "arm's",
        "ratio [interval]",
        "segments",
        "p",
        "verdict",
    ]
    return TableData(header, [_speed_row(report, speed) for speed in found.speed])


def _speed_row(report: Report, speed: LoadSpeed) -> list[str]:
    form = "{:.1f}" if speed.metric == "tokens/s" else "{:.4f} s"
    return [
        report.label(speed.arm, speed.length),
        speed.point,
        speed.metric,
        form.format(speed.baseline),
        form.format(speed.own),
        format_estimate(speed.ratio, "{:.3f}x"),
        str(speed.ratio.groups),
        "-" if speed.adjusted_p is None else f"{speed.adjusted_p:.3f}",
        speed.verdict,
    ]


def _state_table(report: Report, found: LoadReport) -> TableData:
    header = [
        "arm",
        "load",
        "requests",
        "queued",
        "TTFT p90",
        "e2e p90",
        "goodput",
        "gain [95%]",
        "grows [95%]",
        "serves about",
        "queue",
    ]
    return TableData(header, [_state_row(report, state) for state in found.states], "How the load was borne")


def _state_row(report: Report, state: LoadState) -> list[str]:
    return [
        report.label(state.arm, state.length),
        state.point,
        str(state.requests),
        f"{state.queued:.3f} s",
        f"{state.ttft_p90:.3f} s",
        f"{state.e2e_p90:.3f} s",
        "-" if state.goodput is None else f"{100 * state.goodput:.0f}%",
        format_estimate(state.goodput_gain, "{:+.2f}"),
        format_estimate(state.growth, "{:.2f}"),
        "-" if state.capacity is None else f"{state.capacity:.3g}/s",
        state.queue,
    ]
