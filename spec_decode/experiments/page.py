"""report.html: one file, tables and SVG plots, no scripts, nothing from the network, light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from dovetail.commands import page, svg
from dovetail.spec_decode.experiments.plots import Bar, Cell, heat_grid, stacked_bars
from dovetail.spec_decode.experiments.report import Report
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL
from dovetail.spec_decode.experiments.sections import all_sections
from dovetail.spec_decode.experiments.speed import PRIMARY
from dovetail.spec_decode.experiments.tables import Section, TableData
from dovetail.spec_decode.experiments.terminal import verdict_lines

_STYLE = """<style>.bar { stroke: none; } .cell { stroke: none; } .ok { color: var(--c2); } .bad { color: var(--c1);
  font-weight: 600; } td { max-width: 34rem; } td:first-child { white-space: nowrap; }
  .facts td { max-width: 62rem; } h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
  .verdicts { list-style: none; padding: 0; } .notes { margin: .3rem 0; max-width: 60rem; }</style>"""
_CLASSES = {
    "faster": "ok",
    "identical": "ok",
    "lossless": "ok",
    "consistent": "ok",
    "ran": "ok",
    "ran, as the baseline": "ok",
    "ran, no effect here": "soft",
    "not tried": "soft",
    "not served": "soft",
    "slower": "bad",
    "LOSSY": "bad",
    "REAL": "bad",
    "failed": "bad",
    "refused": "bad",
    "undecided": "soft",
    "not shown": "soft",
    "tie": "soft",
}
_DEEPEST = 1.0
"""Ratio of the logarithm's size at which a cell has its full colour: a factor of e."""


def report_page(report: Report) -> str:
    """The page of a report."""
    found = report.provenance
    parts = [
        _STYLE,
        f"<h1>dovetail ab: {escape(found.name)}</h1>",
        f'<p class="soft">{escape(found.date)}, {escape(str(found.machine.get("cpu", "")))}</p>',
        *(f'<p class="warning">{escape(text)}</p>' for text in _warnings(report)),
        f'<ul class="verdicts">{"".join(f"<li>{escape(line)}</li>" for line in verdict_lines(report))}</ul>',
    ]
    plots = {
        "3. Acceptance": "".join(_acceptance_plots(report)),
        "4. Speed": "".join(_speed_plots(report)),
        "5. Batch x length": "".join(_grid_plots(report)),
        "6. Cost per step": "".join(_step_plots(report)),
    }
    for section in all_sections(report):
        parts += _section(section, plots.get(section.title, ""))
    parts.append(f"<details><summary>Experiment</summary>{page.plain_data(found.experiment)}</details>")
    parts.append(f"<details><summary>Resolved configs of the arms</summary>{page.plain_data(found.arms)}</details>")
    return page.whole_page(f"dovetail ab: {found.name}", parts)


def _warnings(report: Report) -> list[str]:
    return [*([report.provenance.noise] if report.provenance.noise else []), *report.warnings]


def _section(section: Section, plots: str) -> Iterator[str]:
    yield f"<h2>{escape(section.title)}</h2>"
    if plots:
        yield f'<div class="plots">{plots}</div>'
    for table in section.tables:
        if table.title:
            yield f"<h3>{escape(table.title)}</h3>"
        yield _table(table)
    for note in section.notes:
        yield f'<p class="soft notes">{escape(note)}</p>'


def _table(data: TableData) -> str:
    rows = []
    for row in data.rows:
        cells = [f'<td class="{_CLASSES[cell]}">' if cell in _CLASSES else "<td>" for cell in row]
        rows.append(f"<tr>{''.join(f'{tag}{escape(cell)}</td>' for tag, cell in zip(cells, row, strict=True))}</tr>")
    body = "".join(rows)
    if any(data.header):
        return page.table(data.header, body)
    return f'<div class="scroll"><table class="facts"><tbody>{body}</tbody></table></div>'


def _speed_plots(report: Report) -> Iterator[str]:
    for metric in dict.fromkeys(s.metric for s in report.speed if s.category is None):
        rows = [
            svg.Interval(
                f"{report.label(s.arm, s.length)}, batch {s.batch}",
                s.ratio.value,
                (s.ratio.low, s.ratio.high) if s.ratio.low is not None and s.ratio.high is not None else None,
                s.verdict,
            )
            for s in report.speed
            if s.metric == metric and s.category is None
        ]
        yield svg.intervals(f"{metric}: ratio to plain, 95%", rows, lambda v: f"{v:g}", mark=1.0)


def _acceptance_plots(report: Report) -> Iterator[str]:
    overall = [a for a in report.acceptance if a.category is None and a.positions]
    smallest = min((a.batch for a in overall), default=0)
    series = [
        svg.Series(report.label(a.arm, a.length), [(float(j + 1), share) for j, share in enumerate(a.positions)])
        for a in overall
        if a.batch == smallest and len(a.positions) > 1
    ]
    if series:
        title = f"Share of steps with at least j accepted drafts, batch {smallest}"
        yield svg.curves(title, series, _integer, lambda v: f"{v:.0%}", "j", legend="top")
    by_category = [a for a in report.acceptance if a.category is not None and a.batch == smallest]
    rows = [
        svg.Interval(
            f"{report.label(a.arm, a.length)}, {a.category}",
            a.accepted_length.value,
            (a.accepted_length.low, a.accepted_length.high)
            if a.accepted_length.low is not None and a.accepted_length.high is not None
            else None,
            "s0",
        )
        for a in by_category
        if a.accepted_length is not None
    ]
    if rows:
        yield svg.intervals(f"Accepted length by category, batch {smallest}, 95%", rows, lambda v: f"{v:g}", mark=1.0)


def _integer(value: float) -> str:
    return f"{value:g}" if value == int(value) else ""


def _grid_plots(report: Report) -> Iterator[str]:
    if not report.grid:
        return

    batches = sorted({cell.batch for cell in report.grid})
    variants = list(dict.fromkeys((cell.arm, cell.length) for cell in report.grid))
    verdicts = {(s.arm, s.length, s.batch): s.verdict for s in report.speed if s.metric == PRIMARY and not s.category}
    cells = [
        Cell(
            variants.index((c.arm, c.length)),
            batches.index(c.batch),
            f"{c.speedup:.2f}",
            verdicts[c.arm, c.length, c.batch],
            min(1.0, abs(math.log(c.speedup)) / _DEEPEST),
        )
        for c in report.grid
    ]
    names = [report.label(*variant) for variant in variants]
    yield heat_grid("Speed-up in tokens/s", names, [f"batch {batch}" for batch in batches], cells)
    yield from _model_plots(report, batches)


def _model_plots(report: Report, batches: Sequence[int]) -> Iterator[str]:
    last = max(2 * batches[-1], 8)
    for model in report.cost_models:
        if len(model.batches) < 2:
            continue
        curve = [(float(batch), model.speedup(batch)) for batch in range(1, last + 1)]
        measured = [
            (float(c.batch), c.decode_speedup)
            for c in report.grid
            if (c.arm, c.length) == (model.arm, model.length) and c.decode_speedup is not None
        ]
        label = report.label(model.arm, model.length)
        series = [svg.Series("predicted", curve), svg.Series("measured", sorted(measured))]
        series = [one for one in series if one.points]
        yield svg.curves(
            f"{label}: speed-up of decoding by batch; predicted from {', '.join(map(str, model.batches))}",
            series,
            _integer,
            lambda v: f"{v:g}",
            "batch size",
            legend="top",
        )


def _step_plots(report: Report) -> Iterator[str]:
    names = ["draft", "verify", "sample", "prepare", "schedule"]
    for batch in sorted({s.batch for s in report.steps}):
        own = sorted((s for s in report.steps if s.batch == batch), key=lambda s: (s.arm != BASELINE, s.arm != CONTROL))
        bars = [Bar(report.label(s.arm, s.length), [s.draft, s.verify, s.sample, s.prepare, s.schedule]) for s in own]
        yield stacked_bars(f"Milliseconds per step, batch {batch}", names, bars, "ms")
