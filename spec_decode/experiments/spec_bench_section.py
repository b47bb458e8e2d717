"""Spec-Bench's table: a row per variant, a column per task, as its leaderboard has it."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.spec_decode.experiments.report import Report
from dovetail.spec_decode.experiments.spec_bench import OVERALL, TASKS, SpecBenchScore
from dovetail.spec_decode.experiments.tables import Section, TableData


def spec_bench_sections(report: Report) -> list[Section]:
    """One section for the data set Spec-Bench, none for others."""
    if report.provenance.workload["format"] != "spec_bench":
        return []
    scores = report.spec_bench
    if not scores:
        return [Section("Spec-Bench", ["Spec-Bench runs one request at a time: add 1 to grid.batch_sizes."], [])]
    tasks = [task for task in (*TASKS, OVERALL) if any(score.task == task for score in scores)]
    variants = dict.fromkeys((score.arm, score.length) for score in scores)
    found = {(score.arm, score.length, score.task): score for score in scores}
    rows = []
    for arm, length in variants:
        own = [found.get((arm, length, task)) for task in tasks]
        rows.append([report.label(arm, length), *map(_cell, own[:-1]), _accepted(own[-1]), _cell(own[-1])])
    titles = [TASKS[task] for task in tasks[:-1]]
    return [Section("Spec-Bench", _notes(report, scores), [TableData(["arm", *titles, "#MAT", OVERALL], rows)])]


def _cell(score: SpecBenchScore | None) -> str:
    if score is None:
        return "-"
    deviation = "" if score.speedup_deviation is None else f" ± {score.speedup_deviation:.2f}"
    return f"{score.speedup:.2f}x{deviation}"


def _accepted(score: SpecBenchScore | None) -> str:
    return "-" if score is None or score.mean_accepted is None else f"{score.mean_accepted:.2f}"


def _notes(report: Report, scores: Sequence[SpecBenchScore]) -> list[str]:
    notes = [
        "By Spec-Bench's definitions, at batch size 1: speed-ups are ratios of tokens/s, each the mean over questions"
        " of their tokens / seconds, prompts included; #MAT (mean accepted tokens) is tokens per decode step, bonus"
        " token included. ±: standard deviation over repetitions, which says nothing about other prompts. The speed-ups"
        " of the section Speed are geometric means of paired ratios, with intervals over prompts."
    ]
    if report.provenance.experiment["workload"]["turns"] == "first":
        notes.append("First turns alone: Spec-Bench asks all of them (workload.turns: all).")
    missing = [title for task, title in TASKS.items() if not any(score.task == task for score in scores)]
    if missing:
        notes.append(f"Not among the prompts: {', '.join(missing)}.")
    return notes
