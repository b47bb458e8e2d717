"""The plots of report.html, drawn from a report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from dovetail.commands import svg
from dovetail.spec_decode.experiments.bootstrap import Estimate
from dovetail.spec_decode.experiments.headline import METRICS
from dovetail.spec_decode.experiments.page.forest import Effect, Row, forest
from dovetail.spec_decode.experiments.page.plots import Bar, Cell, heat_grid, histograms, stacked_bars
from dovetail.spec_decode.experiments.page.request_views import (
    length_shares,
    lengths_by_place,
    of_batch,
    place_width,
    prompt_views,
)
from dovetail.spec_decode.experiments.page.scatter import Dot, Panel, scatter
from dovetail.spec_decode.experiments.records import by_variant
from dovetail.spec_decode.experiments.report import Report
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL
from dovetail.spec_decode.experiments.speed import PLAIN, PRIMARY, Speed

_DEEPEST = 1.0
"""Logarithm of a ratio at which a cell has its full colour: a factor of e."""


def forest_plot(report: Report) -> str:
    """Every arm against the baseline, at each batch size, the control last; empty where nothing was compared."""
    overall = [s for s in report.speed if s.category is None]
    rows = list(dict.fromkeys((s.batch, s.arm == CONTROL, s.arm, s.length) for s in overall))
    rows.sort(key=lambda row: (row[1], row[0]))
    if not rows:
        return ""
    found = {(s.metric, s.batch, s.arm, s.length): s for s in overall}
    panels = {}
    for metric, title in METRICS.items():
        speeds = [found.get((metric, batch, arm, length)) for batch, _, arm, length in rows]
        panels[title] = [
            None if s is None or math.isnan(s.ratio.value) else Effect(s.ratio.value, ends_of(s.ratio), _style_of(s))
            for s in speeds
        ]
    tokens = {(e.batch, e.arm, e.length): e.verdict for e in report.equality}
    shown = [
        Row(f"{report.label(arm, length)}, batch {batch}", tokens.get((batch, arm, length), "-"))
        for batch, _, arm, length in rows
    ]
    return forest(f"Ratio to {report.label(*report.baseline)}, more than 1 is faster", shown, panels)


def _style_of(speed: Speed) -> str:
    return "undecided" if speed.verdict == "not judged" else speed.verdict


def ends_of(estimate: Estimate) -> tuple[float, float] | None:
    """The interval of an estimate, where it has one."""
    return None if estimate.low is None or estimate.high is None else (estimate.low, estimate.high)


def request_plots(report: Report) -> Iterator[str]:
    """Prompts, accepted lengths and places in the output, at the smallest batch size."""
    records = by_variant(report.requests)
    batch = min((key[0] for key in records), default=0)
    own = [(report.label(arm, length), found) for arm, length, found in of_batch(records, batch) if length is not None]
    baseline = records.get((batch, BASELINE, None), [])
    panels = [
        Panel(label, [Dot(v.accepted_length, v.speedup, f"prompt {v.prompt} ({v.category})") for v in views])
        for label, found in own
        if (views := prompt_views(found, baseline))
    ]
    if panels:
        title = f"Prompts, batch {batch}"
        yield scatter(title, panels, "accepted length (tokens per decode step)", "speed-up in tokens/s", mark=1.0)
    shares = [(label, found) for label, records in own if (found := length_shares(records))]
    if shares:
        yield histograms(f"Tokens per decode step, batch {batch}: share of steps", shares)
    width = place_width(report.requests)
    lines = [svg.Series(label, points) for label, found in own if len(points := lengths_by_place(found, width)) > 1]
    if lines:
        title = f"Tokens per decode step by place in the output, batch {batch}"
        yield svg.curves(title, lines, _integer, lambda v: f"{v:g}", "tokens of output before the step")


def acceptance_plots(report: Report) -> Iterator[str]:
    """Positions within a round, and categories, at the smallest batch size."""
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
            ends_of(a.accepted_length),
            "s0",
        )
        for a in by_category
        if a.accepted_length is not None
    ]
    if rows:
        yield svg.intervals(f"Accepted length by category, batch {smallest}, 95%", rows, lambda v: f"{v:g}", mark=1.0)


def _integer(value: float) -> str:
    return f"{value:g}" if value == int(value) else ""


def grid_plots(report: Report) -> Iterator[str]:
    """Speed-up by batch size and length, measured and predicted."""
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
    if report.baseline == PLAIN:
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
        parts = f"predicted from batch {', '.join(map(str, model.batches))}"
        series = [svg.Series(parts, curve), svg.Series("measured", sorted(measured))]
        series = [one for one in series if one.points]
        yield svg.curves(
            f"{label}: speed-up of decoding",
            series,
            _integer,
            lambda v: f"{v:g}",
            "batch size",
            legend="top",
        )


def step_plots(report: Report) -> Iterator[str]:
    """What the milliseconds of a step are spent on."""
    names = ["draft", "verify", "sample", "prepare", "schedule"]
    for batch in sorted({s.batch for s in report.steps}):
        own = sorted((s for s in report.steps if s.batch == batch), key=lambda s: (s.arm != BASELINE, s.arm != CONTROL))
        bars = [Bar(report.label(s.arm, s.length), [s.draft, s.verify, s.sample, s.prepare, s.schedule]) for s in own]
        yield stacked_bars(f"Milliseconds per step, batch {batch}", names, bars, "ms")
