"""Reports of one experiment from several machines, or several runs of it, put together.

Every ratio is of one run: an arm's turn and the baseline's, of the same group, in the same repetition. By group, the
logarithms of a run are averaged over its repetitions, and these over runs, each with the same weight; groups are what
the interval draws. So the estimate is the geometric mean over these runs, and the interval says what other prompts
would get on these machines, not what other machines would. Runs of the same prompts are no independent evidence of what
prompts gain: an interval over runs x groups would be too narrow.

Whether runs agree is tested in pairs, by the difference of their logarithms in each group. Cochran's Q takes estimates
as independent, which those of the same prompts are not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations

from dovetail.commands.checks import require
from dovetail.contracts.errors import ConfigError
from dovetail.spec_decode.experiments.bootstrap import Estimate, Resampler, holm
from dovetail.spec_decode.experiments.columns import plain
from dovetail.spec_decode.experiments.compare import experiment_differences
from dovetail.spec_decode.experiments.families import Verdict, exponential
from dovetail.spec_decode.experiments.records import RequestRecord, by_variant, label_among
from dovetail.spec_decode.experiments.saved_report import SavedReport
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL
from dovetail.spec_decode.experiments.showing import baseline_among
from dovetail.spec_decode.experiments.speed import METRICS, PRIMARY, Question, judge_questions, questions, repeated
from dovetail.spec_decode.experiments.tables import Section, TableData, format_estimate

FORMAT = 1
_ALLOWED = frozenset(
    {"name", "baseline", "repetitions", "rerun_disturbed", "warmup", "tie_gap", "compatibility", "keep_going"}
)
"""Keys of the experiment in which runs may differ: how often each measured, and what it tried besides."""

Logs = Mapping[int, float]
"""By group."""


@dataclass(frozen=True)
class Run:
    """One of the reports."""

    name: str
    date: str
    cpu: str
    cpus: int | None
    requests: int
    equality: Sequence[str]
    """Verdicts of its arms that are not the baseline, each once."""


@dataclass(frozen=True)
class MergedSpeed:
    """One metric of one variant at one batch size, compared with another variant of the same run."""

    metric: str
    label: str
    against: str
    """The baseline; of a pair another arm, and of the control `plain`."""
    is_pair: bool
    batch: int
    ratio: Estimate
    """Over all runs; more than 1 is better, `error` is that of the logarithm. Its interval agrees with the verdict."""
    adjusted_p: float | None
    """After Holm, over all metrics, pairs, variants and batch sizes but the control."""
    verdict: Verdict
    by_run: Sequence[Estimate]
    """Of each run alone, over the same groups."""
    agreement_p: float | None
    """How likely such a difference between two runs is if all agree; after Holm over pairs of runs."""
    left_out: int
    """Groups that some run has not measured."""


@dataclass(frozen=True)
class Merged:
    """Several reports together."""

    name: str
    baseline: str
    """The arm that others are compared with."""
    runs: Sequence[Run]
    speed: Sequence[MergedSpeed]


def merge_reports(reports: Mapping[str, SavedReport], baseline: str | None = None) -> Merged:
    """Merges reports by name.

    Args:
        baseline: the arm that others are compared with; None: that of the reports, which is the same in all.

    Raises `ConfigError` for fewer than two reports, for those of different experiments, models or prompts (with the
    keys that differ), for runs that ended by what they saw, for reports with data in common, and for baselines that
    differ or that are no arm.
    """
    require(len(reports) > 1, "one report is merged already: give two or more, of different files")
    names, first = list(reports), next(iter(reports.values()))
    for name, report in reports.items():
        if differing := list(experiment_differences(first, report, _ALLOWED)):
            raise ConfigError(f"{names[0]} and {name} are not of one experiment: {'; '.join(differing)}")
        ended = report.ended_by_itself
        require(not ended, f"{name} was run until it was decided: its number of groups depends on what they brought")
    records = {name: report.records() for name, report in reports.items()}
    for one, other in combinations(names, 2):
        require(
            not _is_of_one_run(reports[one], reports[other], records[one], records[other]),
            f"{one} and {other} are of the same run, which counts once (a run that --resume went on with is the same):"
            " give the longer report alone",
        )
    against = {name: baseline_among(report, records[name], baseline) for name, report in reports.items()}
    labels = {name: label_among(first.provenance.arms, *own) for name, own in against.items()}
    if len(set(against.values())) > 1:
        said = ", ".join(f"{name}: {label}" for name, label in labels.items())
        raise ConfigError(f"the reports have several baselines ({said}): choose one with --baseline")
    found = [by_variant(own) for own in records.values()]
    common = [key for key in found[0] if all(key in own for own in found)]
    judged = [key for key in common if key[1] != CONTROL and key[1:] != against[names[0]]]
    require(bool(judged), f"{', '.join(names)} have no arm in common")
    asked = questions(common, against[names[0]])
    logs = {question: [question.logs(own) for own in found] for question in asked}
    speed = list(_judge(logs, first.provenance.arms, Resampler(0)))
    runs = [_run(name, report) for name, report in reports.items()]
    return Merged(first.provenance.experiment["name"], labels[names[0]], runs, speed)


def _is_of_one_run(
    one: SavedReport, other: SavedReport, records: Sequence[RequestRecord], others: Sequence[RequestRecord]
) -> bool:
    """By the run's name, which its journal keeps, and by requests that both have: no clock reads alike twice."""
    run = one.provenance.extent.get("run")
    if run is not None and run == other.provenance.extent.get("run"):
        return True
    return not {_trace(record) for record in records}.isdisjoint(map(_trace, others))


def _trace(record: RequestRecord) -> tuple[object, ...]:
    place = (record.batch, record.arm, record.length, record.repetition, record.group, record.prompt)
    return (*place, *record.times)


def _run(name: str, report: SavedReport) -> Run:
    machine = report.provenance.machine
    verdicts = dict.fromkeys(item.verdict for item in report.equality if item.arm not in (BASELINE, CONTROL))
    cpu, cpus = str(machine.get("cpu", "unknown")), machine.get("usable_cpus")
    return Run(name, report.provenance.date, cpu, cpus, len(report.requests.arm), list(verdicts))


def _judge(
    logs: Mapping[Question, Sequence[Logs]], arms: Mapping[str, Mapping[str, object]], resampler: Resampler
) -> Iterator[MergedSpeed]:
    """As in a report of one run: the same family, and what repeats another ratio is left out."""
    together = {question: pool(runs) for question, runs in logs.items()}
    for question, found in judge_questions(together, resampler).items():
        if repeated(question, together) is not None:
            continue
        runs, groups = logs[question], list(together[question])
        yield MergedSpeed(
            metric=question.metric,
            label=label_among(arms, *question.key[1:]),
            against=label_among(arms, *question.against[1:]),
            is_pair=question.is_pair,
            batch=question.key[0],
            ratio=found.ratio,
            adjusted_p=found.decision.adjusted_p,
            verdict=found.decision.verdict,
            by_run=[exponential(resampler.mean([own[group] for group in groups])) for own in runs],
            agreement_p=agreement(runs, groups, resampler),
            left_out=len({group for own in runs for group in own}) - len(groups),
        )


def pool(runs: Sequence[Logs]) -> Logs:
    """The mean over runs, of each group that all have."""
    groups = [group for group in runs[0] if all(group in own for own in runs)]
    return {group: math.fsum(own[group] for own in runs) / len(runs) for group in groups}


def agreement(runs: Sequence[Logs], groups: Sequence[int], resampler: Resampler) -> float | None:
    """The least p-value of pairs of runs, paired by group, after Holm; None with too few groups."""
    differences = [resampler.mean([a[group] - b[group] for group in groups]) for a, b in combinations(runs, 2)]
    p_values = {index: found.p for index, found in enumerate(differences) if found.p is not None}
    return min(holm(p_values).values(), default=None)


def merged_json(merged: Merged) -> str:
    """The text of a merged report's file."""
    return json.dumps({"dovetail_ab_merged": FORMAT, **plain(asdict(merged))}, ensure_ascii=False) + "\n"


def merged_sections(merged: Merged) -> list[Section]:
    """What is shown of it."""
    runs = [
        [str(index), run.name, run.date, f"{run.cpu}, {run.cpus} CPUs", str(run.requests), ", ".join(run.equality)]
        for index, run in enumerate(merged.runs, 1)
    ]
    numbers = [str(index) for index in range(1, len(merged.runs) + 1)]
    header = ["arm", "batch", *(f"run {number}" for number in numbers), "p they agree", "all runs", "p", "verdict"]
    alone = [item for item in merged.speed if not item.is_pair]
    tables = [
        TableData(header, [_speed_row(item, item.label) for item in alone if item.metric == metric], metric)
        for metric in METRICS
        if any(item.metric == metric for item in alone)
    ]
    if pairs := [item for item in merged.speed if item.is_pair]:
        rows = [_speed_row(item, f"{item.label} / {item.against}") for item in pairs]
        tables.append(TableData(header, rows, f"{PRIMARY}, arms against each other"))
    notes = [
        f"Ratios to {merged.baseline} of the same run (of {CONTROL}: to {BASELINE}), more than 1 is faster: by group of"
        " prompts the mean logarithm over repetitions, then over runs with equal weights. Intervals are over groups, of"
        " these machines: of each run 95%, of all runs at the level at which the verdict was tested. p they agree: of"
        " the largest difference between two runs, paired by group, Holm-corrected. p: of no effect, Holm-corrected"
        " over metrics, pairs, arms, lengths and batch sizes."
    ]
    if left_out := max((item.left_out for item in merged.speed), default=0):
        notes.append(f"Up to {left_out} groups are left out, which some run has not measured.")
    return [
        Section("Runs", [], [TableData(["", "report", "date", "machine", "requests", "equality"], runs)]),
        Section("Speed", notes, tables),
    ]


def _speed_row(item: MergedSpeed, label: str) -> list[str]:
    p_values = ["-" if p is None else f"{p:.3f}" for p in (item.agreement_p, item.adjusted_p)]
    estimates = [format_estimate(one, "{:.3f}") for one in (*item.by_run, item.ratio)]
    return [label, str(item.batch), *estimates[:-1], p_values[0], estimates[-1], p_values[1], item.verdict]
