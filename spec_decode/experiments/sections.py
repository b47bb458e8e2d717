"""The report as sections of text and tables, for the terminal and the page alike. Cells are text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.spec_decode.experiments.acceptance import DEFINITIONS, Acceptance
from dovetail.spec_decode.experiments.bootstrap import MIN_GROUPS, Estimate
from dovetail.spec_decode.experiments.equality import Equality
from dovetail.spec_decode.experiments.report import Report
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL
from dovetail.spec_decode.experiments.speed import METRICS, PER_REQUEST, PRIMARY, Speed

_MAX_DIVERGENCES = 12


@dataclass(frozen=True)
class TableData:
    """A table. The last column may hold verdicts, which are coloured."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


@dataclass(frozen=True)
class Section:
    """One part of the report."""

    title: str
    notes: Sequence[str]
    tables: Sequence[TableData]


def all_sections(report: Report) -> list[Section]:
    """In the order in which a report is read."""
    return [
        provenance_section(report),
        equality_section(report),
        acceptance_section(report),
        speed_section(report),
        grid_section(report),
        steps_section(report),
        memory_section(report),
        compatibility_section(report),
    ]


def label_of(arm: str, length: int | None) -> str:
    """A variant's name in tables."""
    return arm if length is None else f"{arm}@{length}"


def provenance_section(report: Report) -> Section:
    """What it was made of and on."""
    found = report.provenance
    machine, workload = found.machine, found.workload
    facts = {
        "experiment": f"{found.name}, {found.date}, sha256 {found.experiment_sha256[:16]}",
        "model": f"{found.model['path']}, {found.model['dtype']}, quantization {found.model['quantization']},"
        f" sha256 (sampled) {found.model['sampled_sha256'][:16]}",
        "machine": f"{machine['cpu']}, {machine['usable_cpus']} usable CPUs, {found.threads} threads, device"
        f" {machine['device']}",
        "versions": ", ".join(f"{name} {version}" for name, version in machine["versions"].items()),
        "workload": f"{workload['data']} ({workload['format']}, {workload['template']}), {workload['prompts']} prompts,"
        f" sha256 {workload['sha256'][:16]}; tokens {workload['prompt_tokens']['min']} to"
        f" {workload['prompt_tokens']['max']}",
        "categories": ", ".join(f"{name} {count}" for name, count in workload["categories"].items()),
        "sampling": _pairs(found.experiment["sampling"]),
        "procedure": f"{found.experiment['repetitions']} repetitions, {found.experiment['warmup']} warm-up groups per"
        f" arm dropped, order {found.experiment['order']}, prefix cache emptied before each group",
        "seeds": _pairs(found.seeds),
    }
    for index, engine in enumerate(found.engines):
        name = "engine" if len(found.engines) == 1 else f"engine {index + 1}"
        facts[name] = f"{', '.join(engine.variants)}; config sha256 {engine.config_sha256[:16]}, plugin set"
        facts[name] += f" {engine.plugin_hash[:16]}, attention {engine.attention}"
        facts[f"plugins of {name}"] = _pairs(engine.plugins)
    differences = TableData(
        ["key", *found.arms],
        [[key, *(_shown(values.get(arm)) for arm in found.arms)] for key, values in found.differences.items()],
        "Differences between arms, resolved",
    )
    undeclared = [f"Allowed, though nobody declared it: arms differ in {key}." for key in found.undeclared]
    noise = [f"WARNING: {found.noise}."] if found.noise else []
    notes = [*noise, *undeclared, *found.notes]
    return Section("1. Provenance", notes, [TableData(["", ""], [list(row) for row in facts.items()]), differences])


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_shown(value)}" for key, value in values.items())


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def equality_section(report: Report) -> Section:
    """Lossless or not."""
    is_greedy = report.provenance.experiment["sampling"]["temperature"] == 0
    header = [
        "arm",
        "batch",
        "identical",
        "diverged",
        "ties",
        "REAL",
        "unstable",
        "p (above control)",
        "why",
        "verdict",
    ]
    rows = [_equality_row(item) for item in report.equality]
    notes = [
        f"Every token of every prompt, beside the arm {BASELINE} at the same batch size; {CONTROL} is the control."
        " p: exact McNemar test (one-sided) that an arm diverges on more prompts than the control. unstable: prompts of"
        " which repetitions differ among themselves."
    ]
    if not is_greedy:
        header = ["arm", "batch", "log probability per token, minus plain [95%]", "why", "verdict"]
        rows = [
            [
                label_of(e.arm, e.length),
                str(e.batch),
                _estimate(e.logprob_difference, "{:+.4f}"),
                e.reason,
                e.verdict,
            ]
            for e in report.equality
        ]
        notes = [
            "Sampled: tokens differ by design. Compared is the mean log probability per token under the target of what"
            " was generated, paired by prompt, Holm-corrected: a rule that keeps the target's distribution leaves it as"
            " it is. This sees a shift towards likelier or less likely text, and no other kind."
        ]
    tables = [TableData(header, rows)]
    shown = [(e, d) for e in report.equality for d in e.divergences][:_MAX_DIVERGENCES]
    if shown:
        tables.append(_divergence_table(shown, sum(len(e.divergences) for e in report.equality)))
    return Section("2. Equality", notes, tables)


def _equality_row(item: Equality) -> list[str]:
    diverged = len(item.divergences)
    p_value = "-" if item.p_above_control is None else f"{item.p_above_control:.3f}"
    return [
        label_of(item.arm, item.length),
        str(item.batch),
        str(item.prompts - diverged),
        str(diverged),
        str(diverged - item.num_real),
        str(item.num_real),
        str(item.unstable),
        p_value,
        item.reason,
        item.verdict,
    ]


def _divergence_table(shown: Sequence[tuple[Equality, Any]], count: int) -> TableData:
    rows = [
        [
            label_of(item.arm, item.length),
            str(item.batch),
            f"{one.prompt} ({one.category})",
            str(one.index),
            f"{_token(one.expected)} / {_token(one.got)}",
            f"{one.top2_gap:.2e}",
            "beyond the top" if one.gap is None else f"{one.gap:.2e}",
            "tie" if one.is_tie else "REAL",
        ]
        for item, one in shown
    ]
    header = ["arm", "batch", "prompt", "first at", "plain / arm", "top-2 gap", "gap of the two", "verdict"]
    return TableData(header, rows, f"First divergences ({len(rows)} of {count})")


def _token(token: int | None) -> str:
    return "end" if token is None else str(token)


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
        "drafted per step",
        "wasted",
        "at position 1, 2, ...",
    ]
    overall = [item for item in report.acceptance if item.category is None]
    rows = [
        [
            label_of(a.arm, a.length),
            str(a.batch),
            str(a.drafted),
            str(a.accepted),
            _estimate(a.rate, "{:.3f}", 0, 1),
            _estimate(a.rate_of_requests, "{:.3f}", 0, 1),
            _estimate(a.accepted_length, "{:.2f}", 1),
            "-" if a.drafted_per_step is None else f"{a.drafted_per_step:.2f}",
            f"{a.wasted:.2f}",
            " ".join(f"{share:.2f}" for share in a.positions),
        ]
        for a in overall
    ]
    notes = ["Step t drafts k_t tokens, of which a_t stand, and adds b_t = 1 of the target's own."]
    notes += [f"{name}: {text}." for name, text in DEFINITIONS.items()]
    tables = [TableData(header, rows)] if rows else []
    tables += _category_tables(report.acceptance)
    return Section("3. Acceptance", notes, tables)


def _category_tables(items: Sequence[Acceptance]) -> Iterator[TableData]:
    categories = list(dict.fromkeys(item.category for item in items if item.category is not None))
    if not categories:
        return
    found = {(a.arm, a.length, a.batch, a.category): a for a in items}
    variants = list(dict.fromkeys((a.arm, a.length, a.batch) for a in items))
    rows = [
        [label_of(v[0], v[1]), str(v[2]), *(_estimate(found[*v, c].accepted_length, "{:.2f}", 1) for c in categories)]
        for v in variants
    ]
    yield TableData(["arm", "batch", *map(str, categories)], rows, "Accepted length by category [95%]")
    rates = [
        [label_of(v[0], v[1]), str(v[2]), *(_estimate(found[*v, c].rate, "{:.3f}", 0, 1) for c in categories)]
        for v in variants
    ]
    yield TableData(["arm", "batch", *map(str, categories)], rates, "Acceptance rate (ratio of sums) by category [95%]")


def speed_section(report: Report) -> Section:
    """Ratios to the baseline."""
    notes = [
        "Ratios to plain, more than 1 is faster; geometric means over groups of prompts, each group paired with itself"
        " in the same repetition. 95% intervals: symmetric bootstrap-t over groups (the mean over repetitions of each)."
        " p: of no difference, Holm-corrected over all arms, lengths and batch sizes of a metric. Verdict: by p < 0.05."
        f" {CONTROL} is the noise, and not corrected. No interval with fewer than {MIN_GROUPS} groups.",
        "to decide: groups of prompts (prompts / batch size) that would decide a ratio like this four times out of"
        " five; detectable: the smallest difference that these groups would decide.",
        *(f"{name}: {text}." for name, text in METRICS.items()),
    ]
    tables = [
        _speed_table([s for s in report.speed if s.metric == metric and s.category is None], metric)
        for metric in METRICS
    ]
    by_category = [s for s in report.speed if s.category is not None]
    if by_category:
        tables.append(_category_speed_table(by_category))
    return Section("4. Speed", notes, tables)


def _speed_table(speeds: Sequence[Speed], metric: str) -> TableData:
    header = ["arm", "batch", "plain", "arm's", "ratio [95%]", "p", "groups", "to decide", "detectable", "verdict"]
    rows = [
        [
            label_of(s.arm, s.length),
            str(s.batch),
            _value(s.baseline, metric),
            _value(s.own, metric),
            _estimate(s.ratio, "{:.3f}"),
            "-" if s.adjusted_p is None else f"{s.adjusted_p:.4f}",
            str(s.ratio.groups),
            "-" if s.groups_to_decide is None else f"{s.groups_to_decide:,}",
            "-" if s.detectable is None else f"{s.detectable:.1%}",
            s.verdict,
        ]
        for s in speeds
    ]
    return TableData(header, rows, metric)


def _value(value: float, metric: str) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:,.1f}/s" if metric in (PRIMARY, PER_REQUEST) else f"{1e3 * value:,.2f} ms"


def _category_speed_table(speeds: Sequence[Speed]) -> TableData:
    categories = list(dict.fromkeys(str(s.category) for s in speeds))
    found = {(s.arm, s.length, s.batch, s.category): s for s in speeds}
    variants = list(dict.fromkeys((s.arm, s.length, s.batch) for s in speeds))
    rows = []
    for variant in variants:
        cells = []
        for category in categories:
            speed = found.get((*variant, category))
            mark = {"faster": " +", "slower": " -"}.get(speed.verdict, "") if speed is not None else ""
            cells.append(_estimate(speed.ratio, "{:.2f}") + mark if speed is not None else "-")
        rows.append([label_of(variant[0], variant[1]), str(variant[2]), *cells])
    title = f"Ratio of {PER_REQUEST} by category [95%] (+ faster, - slower, Holm-corrected within a category)"
    return TableData(["arm", "batch", *categories], rows, title)


def grid_section(report: Report) -> Section:
    """Batch x length, measured beside predicted."""
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
        measured = f"batch {crossover.measured}" if crossover.measured is not None else f"beyond {batches[-1]}"
        predicted_at = f"batch {crossover.predicted}" if crossover.predicted is not None else "none up to 1,024"
        rows.append([label_of(*variant), *cells, measured, predicted_at])
    notes = [
        "Cells: speed-up in tokens/s [95%]; of decoding alone (ITL), measured and predicted by the cost model. Gain"
        " ends: the smallest batch of the grid whose interval is not above 1, and the smallest batch at which the model"
        " predicts no gain.",
        "Cost model: L x T(b, 0) / T(b, k), T = host + forward(rows) + sample + draft, each a line fitted to measured"
        " steps; L and the drafts per step are those of the smallest batch.",
    ]
    header = ["arm", *(f"batch {batch}" for batch in batches), "gain ends (measured)", "gain ends (model)"]
    tables = [TableData(header, rows)] if rows else []
    if report.cost_models:
        tables.append(_model_table(report))
    return Section("5. Batch x length", notes, tables)


def _model_table(report: Report) -> TableData:
    rows = [
        [
            label_of(m.arm, m.length),
            f"{m.accepted_length:.2f}",
            f"{m.drafted_per_step:.2f}",
            f"{m.forward.start:.2f} + {m.forward.slope:.3f} r",
            f"{m.draft.start:.2f} + {m.draft.slope:.3f} b",
            f"{m.rest.start:.2f} + {m.rest.slope:.3f} b",
            f"{m.plain_rest.start:.2f} + {m.plain_rest.slope:.3f} b",
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
            label_of(s.arm, s.length),
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
    return Section("6. Cost per step", notes, [TableData(header, rows)])


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
        [label_of(s.arm, s.length), str(s.batch), f"{s.kv_blocks_peak:,}", f"{s.kv_blocks_peak - plain[s.batch]:+,}"]
        for s in report.steps
        if s.arm not in (BASELINE, CONTROL) and s.batch in plain
    ]
    peak_table = TableData(["arm", "batch", "most KV blocks in use", "more than plain"], peaks, "In use")
    return Section(
        "7. Memory", ["All drafters of an engine are loaded at once."], [TableData(header, rows), peak_table]
    )


def compatibility_section(report: Report) -> Section:
    """Ran or refused."""
    status = [[label_of(s.arm, s.length), s.reason or "-", "ran" if s.ran else "refused"] for s in report.status]
    tables = [TableData(["arm", "reason", "verdict"], status, "Arms")]
    arms = list(dict.fromkeys(trial.arm for trial in report.features))
    features = list(dict.fromkeys(trial.feature for trial in report.features))
    found = {(t.arm, t.feature): t for t in report.features}
    if features:
        rows = [[feature, *(found[arm, feature].outcome for arm in arms)] for feature in features]
        tables.append(TableData(["feature", *arms], rows, "Request features"))
    reasons = [f"{t.arm}, {t.feature}: {t.outcome}: {t.reason}" for t in report.features if t.reason]
    notes = [
        "Each feature is tried in each arm. Greedy requests must bring the baseline's tokens; sampled ones draw from"
        " other random streams with drafts than without, so that only their running is told.",
        *dict.fromkeys(reasons),
    ]
    return Section("8. Compatibility", notes if features else [], tables)


def _estimate(estimate: Estimate | None, form: str, least: float = -math.inf, most: float = math.inf) -> str:
    """Value [low, high]; ends are cut to what the quantity can be."""
    if estimate is None or math.isnan(estimate.value):
        return "-"
    value = form.format(estimate.value)
    if estimate.low is None or estimate.high is None:
        return f"{value} [-]"
    return f"{value} [{form.format(max(least, estimate.low))}, {form.format(min(most, estimate.high))}]"
