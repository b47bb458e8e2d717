"""The sections of numbers that every report has: acceptance, batch sizes x lengths, cost per step and memory.

`sections` says which sections are elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dovetail.spec_decode.experiments.acceptance import DEFINITIONS, Acceptance
from dovetail.spec_decode.experiments.cost import Crossover, Line
from dovetail.spec_decode.experiments.report import Report
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL
from dovetail.spec_decode.experiments.tables import Section, TableData, format_estimate


def acceptance_section(report: Report) -> Section:
    """Rates and lengths."""
    header = [
        "arm",
        "batch",
        "drafted",
        "accepted",
        "rate: ratio of sums [95%]",
        "rate: mean over requests [95%]",
        "accepted length [95%]",
        "round length [95%]",
        "drafted per step",
        "wasted",
    ]
    overall = [item for item in report.acceptance if item.category is None]
    rows = [
        [
            report.label(a.arm, a.length),
            str(a.batch),
            str(a.drafted),
            str(a.accepted),
            format_estimate(a.rate, "{:.3f}"),
            format_estimate(a.rate_of_requests, "{:.3f}"),
            format_estimate(a.accepted_length, "{:.2f}"),
            format_estimate(a.round_length, "{:.2f}"),
            "-" if a.drafted_per_step is None else f"{a.drafted_per_step:.2f}",
            f"{a.wasted:.2f}",
        ]
        for a in overall
    ]
    notes = ["Step t drafts k_t tokens, of which a_t are accepted, and adds b_t = 1 of the target's own."]
    notes += [f"{name}: {text}." for name, text in DEFINITIONS.items()]
    tables = [TableData(header, rows), _position_table(report, overall)] if rows else []
    tables += _category_tables(report)
    return Section("Acceptance", notes, tables)


def _position_table(report: Report, items: Sequence[Acceptance]) -> TableData:
    rows = [
        [
            report.label(a.arm, a.length),
            str(a.batch),
            str(a.decode_steps),
            str(a.rounds),
            *(_shares(shares) for shares in (a.positions, a.positions_of_rounds, a.positions_of_drafts)),
        ]
        for a in items
    ]
    header = ["arm", "batch", "decode steps", "rounds", "of steps", "of rounds", "of drafts"]
    return TableData(header, rows, "At position 1, 2, ...: share with so many accepted draft tokens")


def _shares(shares: Sequence[float | None]) -> str:
    return " ".join("-" if share is None else f"{share:.2f}" for share in shares) or "-"


def _category_tables(report: Report) -> Iterator[TableData]:
    items = report.acceptance
    categories = list(dict.fromkeys(item.category for item in items if item.category is not None))
    if not categories:
        return
    found = {(a.arm, a.length, a.batch, a.category): a for a in items}
    variants = list(dict.fromkeys((a.arm, a.length, a.batch) for a in items))
    rows = [
        [
            report.label(v[0], v[1]),
            str(v[2]),
            *(format_estimate(found[*v, c].accepted_length, "{:.2f}") for c in categories),
        ]
        for v in variants
    ]
    yield TableData(["arm", "batch", *map(str, categories)], rows, "Accepted length by category [95%]")
    rates = [
        [report.label(v[0], v[1]), str(v[2]), *(format_estimate(found[*v, c].rate, "{:.3f}") for c in categories)]
        for v in variants
    ]
    yield TableData(["arm", "batch", *map(str, categories)], rates, "Acceptance rate (ratio of sums) by category [95%]")


def grid_section(report: Report) -> Section:
    """Batch x length, measured and predicted."""
    batches = sorted({cell.batch for cell in report.grid})
    found = {(c.arm, c.length, c.batch): c for c in report.grid}
    crossovers = {(c.arm, c.length): c for c in report.crossovers}
    rows = []
    for variant in dict.fromkeys((c.arm, c.length) for c in report.grid):
        cells = []
        for batch in batches:
            cell = found.get((*variant, batch))
            if cell is None:
                cells.append("-")
                continue
            interval = "" if cell.low is None else f" [{cell.low:.2f}, {cell.high:.2f}]"
            predicted = (
                ""
                if cell.predicted is None or cell.decode_speedup is None
                else (f"; decode {cell.decode_speedup:.2f}, predicted {cell.predicted:.2f}")
            )
            cells.append(f"{cell.speedup:.2f}{interval}{predicted}")
        crossover = crossovers[variant]
        rows.append([report.label(*variant), *cells, gain_end(crossover, batches), predicted_end(crossover)])
    notes = [
        "Cells: speed-up in tokens/s [interval of the verdict, see Speed]; of decoding alone (ITL), measured and"
        " predicted by the cost model. Gain ends: the smallest batch of the grid whose interval lies below 1 (not"
        " shown: an interval that holds 1 shows neither a gain nor its end), and the smallest batch at which the model"
        " predicts no gain; the model needs two batch sizes for that, and beyond the largest it extrapolates.",
        "Cost model: L x T(b, 0) / T(b, k), T = host + forward(rows) + sample + draft, each a line fitted to measured"
        " steps; L and the drafts per step are those of the smallest batch.",
    ]
    header = ["arm", *(f"batch {batch}" for batch in batches), "gain ends (measured)", "gain ends (model)"]
    tables = [TableData(header, rows)] if rows else []
    if report.cost_models:
        tables.append(_model_table(report))
    return Section("Batch x length", notes, tables)


def gain_end(crossover: Crossover, batches: Sequence[int]) -> str:
    """Where the measured gain ends. Without an interval, or with one that holds 1, neither it nor its end is shown."""
    shown = [batch for batch in batches if batch not in crossover.without_interval]
    if not shown:
        return "no interval"
    open_at = f"not shown at batch {_listed(crossover.not_shown)}" if crossover.not_shown else ""
    none = f"no interval: {_listed(crossover.without_interval)}" if crossover.without_interval else ""
    if crossover.measured is not None:
        found = f"batch {crossover.measured}"
    elif open_at:
        found, open_at = open_at, ""
    else:
        found = f"beyond {shown[-1]}"
    rest = "; ".join(part for part in (open_at, none) if part)
    return f"{found} ({rest})" if rest else found


def predicted_end(crossover: Crossover) -> str:
    """Where the model's gain ends, and whether that lies beyond what was measured."""
    known = crossover.predicted_from
    if len(known) < 2:
        return "-"
    if crossover.predicted is not None and crossover.predicted <= known[-1]:
        return f"batch {crossover.predicted}"
    found = f"batch {crossover.predicted}" if crossover.predicted is not None else "none up to 1,024"
    return f"{found} (extrapolated from {_listed(known)})"


def _listed(batches: Sequence[int]) -> str:
    return ", ".join(map(str, batches))


def _model_table(report: Report) -> TableData:
    rows = [
        [
            report.label(m.arm, m.length),
            f"{m.accepted_length:.2f}",
            f"{m.drafted_per_step:.2f}",
            f"{m.forward.start:.2f} + {m.forward.slope:.3f} r",
            *(_by_requests(line, m.batches) for line in (m.draft, m.rest, m.plain_rest)),
        ]
        for m in report.cost_models
    ]
    header = [
        "arm",
        "L",
        "drafts per step",
        "forward, ms (r rows)",
        "draft, ms (b requests)",
        "rest, ms",
        "rest of plain, ms",
    ]
    return TableData(header, rows, "The model's parts")


def _by_requests(line: Line, batches: Sequence[int]) -> str:
    if len(batches) < 2:
        return f"{line.at(batches[0] if batches else 1):.2f} (one batch size)"
    return f"{line.start:.2f} + {line.slope:.3f} b"


def steps_section(report: Report) -> Section:
    """Milliseconds per step."""
    header = [
        "arm",
        "batch",
        "steps",
        "rows",
        "draft",
        "verify",
        "sample",
        "prepare",
        "schedule",
        "total",
        "wasted drafts",
    ]
    rows = [
        [
            report.label(s.arm, s.length),
            str(s.batch),
            f"{s.steps:,}",
            f"{s.rows:.1f}",
            *(f"{value:.2f}" for value in (s.draft, s.verify, s.sample, s.prepare, s.schedule, s.total)),
            f"{s.wasted:.2f}",
        ]
        for s in sorted(report.steps, key=lambda s: (s.batch, s.arm != BASELINE, s.arm != CONTROL))
    ]
    notes = [
        "Mean milliseconds per step, steps that compute prompts left out. verify: the forward pass over last tokens and"
        " drafts. sample: drawing tokens or judging drafts. schedule: everything around the worker (scheduling,"
        " planning, committing). wasted drafts: computed per step and rejected."
    ]
    return Section("Cost per step", notes, [TableData(header, rows)])


def memory_section(report: Report) -> Section:
    """What drafters take from the KV memory."""
    rows = []
    for index, engine in enumerate(report.provenance.engines):
        alone, together = engine.kv_tokens_estimated_without_drafters, engine.kv_tokens_estimated
        lost = "-" if alone is None or together is None else f"{alone - together:,} tokens"
        rows.append(
            [
                str(index + 1),
                f"{engine.kv_blocks:,} x {engine.kv_block_tokens}",
                lost,
                "-" if engine.weight_bytes is None else f"{engine.weight_bytes / 2**20:,.0f} MiB",
                f"{engine.resident_bytes / 2**20:,.0f} MiB",
            ]
        )
    header = [
        "engine",
        "KV blocks x tokens",
        "lost to drafters (estimate)",
        "weights (estimate)",
        "process, all engines up",
    ]
    plain = {s.batch: s.kv_blocks_peak for s in report.steps if s.arm == BASELINE}
    peaks = [
        [
            report.label(s.arm, s.length),
            str(s.batch),
            f"{s.kv_blocks_peak:,}",
            f"{s.kv_blocks_peak - plain[s.batch]:+,}",
        ]
        for s in report.steps
        if s.arm not in (BASELINE, CONTROL) and s.batch in plain
    ]
    peak_table = TableData(["arm", "batch", "most KV blocks in use", "more than plain"], peaks, "In use")
    return Section("Memory", ["All drafters of an engine are loaded at once."], [TableData(header, rows), peak_table])
