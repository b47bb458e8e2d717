"""One HTML page per result or comparison: tables and SVG, no scripts, nothing from the network."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from dovetail.plugins.commands.bench import svg
from dovetail.plugins.commands.bench.compare import Comparison
from dovetail.plugins.commands.bench.machine import noise_warning
from dovetail.plugins.commands.bench.result import PERCENTILE_DEFINITION, Metric, Result
from dovetail.plugins.commands.bench.terminal import SUMMARY_HEADER, format_value, summary_row

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #667085; --grid: #e4e7ec; --paper: #fff;
  --c0: #2563eb; --c1: #d9480f; --c2: #087f5b; --c3: #9333ea; --c4: #b7791f; --c5: #0e7490; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #98a2b3; --grid: #344054; --paper: #12161c;
  --c0: #7aa2ff; --c1: #ff9466; --c2: #4fd1a5; --c3: #c99bff; --c4: #e6c067; --c5: #5fd0e6; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1180px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .7rem; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th:first-child, td:first-child, .facts td { text-align: left; white-space: normal; }
.soft, dd { color: var(--soft); } .warning { border-left: 4px solid var(--c1); padding: .4rem .8rem; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; } svg { max-width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
svg .title { font-size: 13px; font-weight: 600; fill: var(--ink); }
.grid { stroke: var(--grid); fill: none; } .mark { stroke: var(--soft); stroke-dasharray: 3 3; }
.line { fill: none; stroke-width: 2; } .dot { fill-opacity: .75; stroke: none; }
.s0 { stroke: var(--c0); fill: var(--c0); } .s1 { stroke: var(--c1); fill: var(--c1); }
.s2 { stroke: var(--c2); fill: var(--c2); } .s3 { stroke: var(--c3); fill: var(--c3); }
.s4 { stroke: var(--c4); fill: var(--c4); } .s5 { stroke: var(--c5); fill: var(--c5); }
.line.s0, .line.s1, .line.s2, .line.s3, .line.s4, .line.s5 { fill: none; }
.faster { stroke: var(--c2); fill: var(--c2); color: var(--c2); }
.slower { stroke: var(--c1); fill: var(--c1); color: var(--c1); }
.undecided { stroke: var(--soft); fill: var(--soft); color: var(--soft); }
pre { overflow-x: auto; font-size: 12px; }
"""
_CURVE_SAMPLES = 20
"""From so many samples on a distribution is drawn as a curve, below as dots."""


def result_page(result: Result) -> str:
    """The page of one result."""
    warning = noise_warning(result.spans)
    parts = [
        f"<h1>dovetail bench {escape(result.kind)}</h1>",
        f'<p class="soft">{escape(result.date)}, {escape(str(result.environment.get("cpu", "")))}</p>',
        f'<p class="warning">{escape(warning)}</p>' if warning else "",
    ]
    for workload, description in result.workloads.items():
        parts += _workload_section(result, workload, description)
    parts += [
        "<h2>Definitions</h2>",
        _definitions(result.metrics),
        f'<p class="soft">{escape(PERCENTILE_DEFINITION)}</p>',
    ]
    if result.spans:
        parts += ["<h2>The machine while timing</h2>", _spans_table(result)]
    parts += ["<h2>Environment</h2>", _facts({**result.environment, **result.procedure})]
    parts.append(f"<details><summary>Configuration</summary>{_json(result.config)}</details>")
    return _page(f"dovetail bench {result.kind}", parts)


def comparison_page(comparison: Comparison) -> str:
    """The page of a comparison."""
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
    parts = [
        "<h1>dovetail bench compare</h1>",
        f"<p>a: {escape(comparison.a_name)}<br>b: {escape(comparison.b_name)}</p>",
        *(f'<p class="warning">{escape(warning)}</p>' for warning in comparison.warnings),
        _table(header, "".join(rows)),
        svg.intervals("b / a with 95% intervals", bars, lambda v: f"{v:g}", mark=1.0) if bars else "",
        "<h2>Notes</h2>",
        *(f'<p class="soft">{escape(note)}</p>' for note in comparison.notes),
    ]
    return _page("dovetail bench compare", parts)


def _workload_section(result: Result, workload: str, description: Mapping[str, Any]) -> Iterator[str]:
    prefix = f"{workload}/"
    own = {key.removeprefix(prefix): metric for key, metric in result.metrics.items() if key.startswith(prefix)}
    yield f"<h2>{escape(workload)}</h2>"
    yield f'<p class="soft">{escape(", ".join(f"{key} {value}" for key, value in description.items()))}</p>'
    rows = [summary_row(name, metric) for name, metric in own.items()]
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    yield _table(SUMMARY_HEADER, body)
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
    if result.kind != "serve" or not run:
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
    return _table(["repetition", "time", "other processes", "stolen by the host"], "".join(rows))


def _definitions(metrics: Mapping[str, Metric]) -> str:
    found = {key.rpartition("/")[2]: metric.definition for key, metric in metrics.items()}
    return f"<dl>{''.join(f'<dt>{escape(n)}</dt><dd>{escape(d)}</dd>' for n, d in found.items())}</dl>"


def _facts(facts: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><td>{escape(key)}</td><td>{escape(_plain(value))}</td></tr>" for key, value in facts.items())
    return f'<div class="scroll"><table class="facts"><tbody>{rows}</tbody></table></div>'


def _plain(value: Any) -> str:
    return ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, Mapping) else str(value)


def _json(data: Any) -> str:
    return f"<pre>{escape(json.dumps(data, indent=1, default=str))}</pre>"


def _table(header: Sequence[str], body: str) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _seconds_tick(value: float) -> str:
    return f"{value:.4g} s" if abs(value) >= 1 or value == 0 else f"{value * 1e3:.4g} ms"


def _page(title: str, parts: Sequence[str]) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )
