"""The report as sections of text and tables, for the terminal and the page alike. Cells are text.

Here is their order, and the sections on what ran and whether it may be trusted: equality, compatibility, provenance.
What was measured is in `result_sections`. A section that not every report has, or that something else shows too, is a
file of its own: `speed_section`, `load.section`, `spec_bench_section`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.spec_decode.experiments.equality import Equality
from dovetail.spec_decode.experiments.judging import LOSSY_BELOW
from dovetail.spec_decode.experiments.load.section import load_sections
from dovetail.spec_decode.experiments.report import Report
from dovetail.spec_decode.experiments.result_sections import (
    acceptance_section,
    grid_section,
    memory_section,
    steps_section,
)
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL
from dovetail.spec_decode.experiments.spec_bench_section import spec_bench_sections
from dovetail.spec_decode.experiments.speed import Compared
from dovetail.spec_decode.experiments.speed_section import speed_section
from dovetail.spec_decode.experiments.tables import Section, TableData
from dovetail.spec_decode.experiments.trials import Trial

_MAX_DIVERGENCES = 12


def all_sections(report: Report) -> list[Section]:
    """In the order in which a report is read."""
    return [
        equality_section(report),
        acceptance_section(report),
        speed_section(Compared(report.baseline, report.speed, report.pairs), report.label),
        *load_sections(report),
        *spec_bench_sections(report),
        grid_section(report),
        steps_section(report),
        memory_section(report),
        compatibility_section(report),
        provenance_section(report),
    ]


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
        "clocks": _pairs({"MHz when described": machine["cpu_mhz"], **machine["clocks"]}),
        "versions": ", ".join(f"{name} {version}" for name, version in machine["versions"].items()),
        "workload": f"{workload['data']} ({workload['format']}, {workload['template']}), {workload['prompts']} prompts"
        f"{_predictions(workload)}, sha256 {workload['sha256'][:16]}; tokens {workload['prompt_tokens']['min']} to"
        f" {workload['prompt_tokens']['max']}",
        "categories": ", ".join(f"{name} {count}" for name, count in workload["categories"].items()),
        "sampling": _pairs(found.experiment["sampling"]),
        "procedure": f"{found.experiment['repetitions']} repetitions, {found.experiment['warmup']} warm-up groups per"
        f" arm dropped, order {found.experiment['order']}, prefix cache emptied before each group",
        "turns": ", ".join(
            f"batch {batch}: {found.extent.measured[batch]} of {planned}"
            for batch, planned in found.extent.planned.items()
        ),
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
    undeclared = [f"Allowed, though not declared: arms differ in {key}." for key in found.undeclared]
    notes = [*undeclared, *found.notes]
    return Section("Provenance", notes, [TableData(["", ""], [list(row) for row in facts.items()]), differences])


def _predictions(workload: Mapping[str, Any]) -> str:
    """For those who know whether drafters had any to read."""
    return f" ({workload['predictions']} with a prediction)" if "predictions" in workload else ""


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
        "control",
        "p (all)",
        "p (REAL)",
        "why",
        "verdict",
    ]
    rows = [_equality_row(report, item) for item in report.equality]
    notes = [
        f"Every token of every prompt, compared with the arm {BASELINE} at the same batch size. {BASELINE} is here"
        " for larger batches, compared with its own tokens at the first batch size."
        f" control: prompts on which {BASELINE} differs from itself, a second time ({CONTROL}) or at the batch size in"
        " parentheses, whose steps have as many rows as the arm's. p: exact McNemar tests (one-sided,"
        " Holm-corrected) that an arm diverges on more prompts than the control, ties included (all) or not (REAL)."
        " unstable: prompts of which repetitions differ among themselves."
    ]
    tie_gaps = [item.tie_gap for item in report.equality if item.tie_gap is not None]
    if tie_gaps:
        notes.append(f"Tokens whose log probabilities lie within {max(tie_gaps):.2g} of each other are ties.")
    if not is_greedy:
        header = ["arm", "batch", "drafted places", "overrated tokens", "expected", "excess", "p", "why", "verdict"]
        rows = [_sampled_row(report, item) for item in report.equality]
        notes = [
            "Sampled: tokens differ by design, so each rule that claims to be lossless was watched while prompts ran"
            " again with other seeds. A draft overrates tokens to which it gives more probability than the target does:"
            " a rule that accepts too readily lets them come too often. p: evidence from these counts, and from tokens"
            f" that are likelier than they should be, by betting; LOSSY below {LOSSY_BELOW}, Holm-corrected."
        ]
    tables = [TableData(header, rows)]
    shown = [(e, d) for e in report.equality for d in e.divergences][:_MAX_DIVERGENCES]
    if shown:
        tables.append(_divergence_table(report, shown, sum(len(e.divergences) for e in report.equality)))
    return Section("Equality", notes, tables)


def _sampled_row(report: Report, item: Equality) -> list[str]:
    seen = item.drafted_tokens
    counts = ["-"] * 5
    if seen is not None:
        excess = "-" if seen.excess is None else f"{seen.excess:.2f}"
        counts = [str(seen.places), f"{seen.came:.0f}", f"{seen.expected:.0f}", excess, f"{seen.p:.2g}"]
    return [report.label(item.arm, item.length), str(item.batch), *counts, item.reason, item.verdict]


def _equality_row(report: Report, item: Equality) -> list[str]:
    diverged = len(item.divergences)
    control = "-" if item.control_diverged is None else f"{item.control_diverged} (batch {item.control_batch})"
    return [
        report.label(item.arm, item.length),
        str(item.batch),
        str(item.prompts - diverged),
        str(diverged),
        str(diverged - item.num_real),
        str(item.num_real),
        str(item.unstable),
        control,
        *("-" if p is None else f"{p:.3f}" for p in (item.p_all_above_control, item.p_above_control)),
        item.reason,
        item.verdict,
    ]


def _divergence_table(report: Report, shown: Sequence[tuple[Equality, Any]], count: int) -> TableData:
    rows = [
        [
            report.label(item.arm, item.length),
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


def compatibility_section(report: Report) -> Section:
    """Ran or refused."""
    status = [[report.label(s.arm, s.length), s.reason or "-", "ran" if s.ran else "refused"] for s in report.status]
    tables = [TableData(["arm", "reason", "verdict"], status, "Arms")]
    arms = list(dict.fromkeys(trial.arm for trial in report.features))
    features = list(dict.fromkeys(trial.feature for trial in report.features))
    found = {(t.arm, t.feature): t for t in report.features}
    if features:
        rows = [[feature, *(found[arm, feature].outcome for arm in arms)] for feature in features]
        tables.append(TableData(["feature", *arms], rows, "Features"))
    reasons = [_trial_note(trial) for trial in report.features if trial.reason]
    notes = [
        "Each feature is tried in each arm, on a prompt that repeats itself, with values that should show. Greedy"
        " requests must bring the baseline's tokens, and so must seeded ones of arms whose drafts are not drawn; of the"
        " others only whether they ran is reported. Log probabilities are compared where they are asked for. No effect"
        " here: the baseline answers as it does without the feature, so that nothing was shown. Where nothing was"
        " drafted, the arm's part in it was not tried.",
        *dict.fromkeys(reasons),
    ]
    return Section("Compatibility", notes if features else [], tables)


def _trial_note(trial: Trial) -> str:
    what = f"{trial.feature}: {trial.outcome}: {trial.reason}"
    # What no arm could try is reported once.
    return what if trial.outcome in ("not tried", "not served", "ran") else f"{trial.arm}, {what}"
