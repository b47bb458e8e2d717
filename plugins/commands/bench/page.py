"""One HTML page per result or comparison: tables and SVG, no scripts, nothing from the network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from dovetail.commands import page, svg
from dovetail.commands.machine import noise_warning
from dovetail.plugins.commands.bench.comparison import Comparison
from dovetail.plugins.commands.bench.result import PERCENTILE_DEFINITION, Metric, Result, failure_lines
from dovetail.plugins.commands.bench.terminal import SUMMARY_HEADER, format_value, summary_row

_CURVE_SAMPLES = 20
"""From so many samples on a distribution is drawn as a curve, below as dots."""


def result_page(result: Result) -> str:
    """The page of one result."""
    noise = noise_warning(result.spans)
    warnings = [*result.warnings, *([noise] if noise else [])]
    parts = [
        f"<h1>dovetail bench {escape(result.kind)}</h1>",
        f'<p class="soft">{escape(result.date)}, {escape(str(result.environment.get("cpu", "")))}</p>',
        *(f'<p class="warning">{escape(line)}</p>' for line in [*warnings, *failure_lines(result)]),
    ]
    for comparison in result.comparisons:
        parts += _comparison(comparison)
    for workload, description in result.workloads.items():
        parts += _workload_section(result, workload, description)
    parts += [
        "<h2>Definitions</h2>",
        _definitions(result.metrics),
        f'<p class="soft">{escape(PERCENTILE_DEFINITION)}</p>',
    ]
    if result.spans:
        parts += ["<h2>The machine while timing</h2>", _spans_table(result)]
    parts += ["<h2>Environment</h2>", page.facts({**result.environment, **result.procedure, **result.client})]
    parts.append(f"<details><summary>Configuration</summary>{page.plain_data(result.config)}</details>")
    return page.whole_page(f"dovetail bench {result.kind}", parts)


def comparison_page(comparison: Comparison) -> str:
    """The page of a comparison."""
    return page.whole_page("dovetail bench compare", ["<h1>dovetail bench compare</h1>", *_comparison(comparison)])


def _comparison(comparison: Comparison) -> list[str]:
    header = ["metric", "a", "b", "b / a", "95% interval", "verdict on b"]
    rows = []
    for row in comparison.rows:
        interval = "-" if row.interval is None else f"{row.interval[0]:.3f} to {row.interval[1]:.3f}"
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
        values = [format_value(row.a, row.unit), format_value(row.b, row.unit), ratio, interval]
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in (f"{row.name} ({row.statistic})", *values))
        rows.append(f'<tr>{cells}<td class="{row.verdict}">{row.verdict}</td></tr>')
    bars = [
        svg.Interval(row.name, row.ratio, row.interval, row.verdict) for row in comparison.rows if row.ratio is not None
    ]
    return [
        f"<p>a: {escape(comparison.a_name)}<br>b: {escape(comparison.b_name)}</p>",
        *(f'<p class="warning">{escape(warning)}</p>' for warning in comparison.warnings),
        page.table(header, "".join(rows)),
        svg.intervals("b / a with 95% intervals", bars, lambda v: f"{v:g}", mark=1.0) if bars else "",
        "<h2>Notes</h2>",
        *(f'<p class="soft">{escape(note)}</p>' for note in comparison.notes),
    ]


def _workload_section(result: Result, workload: str, description: Mapping[str, Any]) -> Iterator[str]:
    prefix = f"{workload}/"
    own = {key.removeprefix(prefix): metric for key, metric in result.metrics.items() if key.startswith(prefix)}
    yield f"<h2>{escape(workload)}</h2>"
    yield f'<p class="soft">{escape(", ".join(f"{key} {value}" for key, value in description.items()))}</p>'
    rows = [summary_row(name, metric) for name, metric in own.items()]
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    yield page.table(SUMMARY_HEADER, body)
    yield f'<div class="plots">{"".join(_plots(own))}{"".join(_timeline(result, workload))}</div>'


def _plots(metrics: Mapping[str, Metric]) -> Iterator[str]:
    few: dict[str, list[tuple[str, Sequence[float]]]] = {}
    for name, metric in metrics.items():
        if len(metric.samples) < _CURVE_SAMPLES:
            few.setdefault(metric.unit, []).append((name, metric.samples))
        elif metric.unit == "s":
            series = [svg.Series(name, svg.cumulative(metric.samples))]
            title = f"{name}: share of {len(metric.samples):,} samples up to"
            yield svg.curves(title, series, _seconds_tick, lambda v: f"{v:.0%}", name, stepped=True)
    for unit, rows in few.items():
        title = "time, every repetition" if unit == "s" else f"{unit}, every repetition"
        yield svg.dot_rows(title, rows, _seconds_tick if unit == "s" else lambda v: f"{v:,.6g}")


def _timeline(result: Result, workload: str) -> Iterator[str]:
    """Of a serving profile's first run: what each request waited, and how many were there."""
    run = [r for r in result.requests if r.workload == workload and r.repetition == 0]
    if result.kind not in ("online", "serve") or not run:
        return
    waits = [svg.Series("ttft", sorted((r.arrival, r.ttft) for r in run))]
    yield svg.points("TTFT by arrival", waits, _seconds_tick, _seconds_tick, "arrival")
    series = [
        svg.Series("in the system", _running([(r.arrival, r.tokens[-1]) for r in run])),
        svg.Series("waiting", _running([(r.arrival, r.scheduled) for r in run if r.scheduled is not None])),
    ]
    shown = [one for one in series if one.points]
    yield svg.curves("requests over time", shown, _seconds_tick, lambda v: f"{v:g}", "time", stepped=True)


def _running(stays: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """How many of the stays (begin, end) go on, at each time at which that changes."""
    changes = sorted([(begin, 1) for begin, _ in stays] + [(end, -1) for _, end in stays])
    count, found = 0, []
    for time, change in changes:
        count += change
        found.append((time, float(count)))
    return found


def _spans_table(result: Result) -> str:
    rows = []
    for span in result.spans:
        shares = [format_value(share, "share") for share in (span.others, span.stolen)]
        cells = [f"{span.workload} {span.repetition + 1}", format_value(span.seconds, "s"), *shares]
        rows.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    return page.table(["repetition", "time", "other processes", "stolen by the host"], "".join(rows))


def _definitions(metrics: Mapping[str, Metric]) -> str:
    found = {key.rpartition("/")[2]: metric.definition for key, metric in metrics.items()}
    return f"<dl>{''.join(f'<dt>{escape(n)}</dt><dd>{escape(d)}</dd>' for n, d in found.items())}</dl>"


def _seconds_tick(value: float) -> str:
    return f"{value:.4g} s" if abs(value) >= 1 or value == 0 else f"{value * 1e3:.4g} ms"
