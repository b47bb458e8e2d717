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
from functools import partial
from itertools import combinations

from dovetail.commands.checks import require
from dovetail.contracts.errors import ConfigError
from dovetail.spec_decode.experiments.bootstrap import LEVEL, Estimate, Resampler, holm
from dovetail.spec_decode.experiments.columns import plain
from dovetail.spec_decode.experiments.compare import experiment_differences
from dovetail.spec_decode.experiments.families import Verdict, exponential, judge_together, not_judged
from dovetail.spec_decode.experiments.records import Key, RequestRecord, by_variant, label_among
from dovetail.spec_decode.experiments.saved_report import SavedReport
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL
from dovetail.spec_decode.experiments.speed import METRICS, PRIMARY, log_ratios, values_by_turn
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
    """One metric of one variant at one batch size, compared with the baseline of the same run."""

    metric: str
    label: str
    batch: int
    ratio: Estimate
    """Over all runs; more than 1 is better, `error` is that of the logarithm. Its interval agrees with the verdict."""
    adjusted_p: float | None
    """After Holm, over all metrics, variants and batch sizes but the control."""
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
    runs: Sequence[Run]
    speed: Sequence[MergedSpeed]


def merge_reports(reports: Mapping[str, SavedReport]) -> Merged:
    """Merges reports by name. Raises `ConfigError` for fewer than two, for those of different experiments, models or
    prompts (with the keys that differ), and for runs that ended by what they saw."""
    require(len(reports) > 1, "one report is merged already: give two or more, of different files")
    names, first = list(reports), next(iter(reports.values()))
    for name, report in reports.items():
        if differing := list(experiment_differences(first, report, _ALLOWED)):
            raise ConfigError(f"{names[0]} and {name} are not of one experiment: {'; '.join(differing)}")
        ended = report.provenance.extent.get("decided") is not None
        require(not ended, f"{name} was run until it was decided: its number of groups depends on what they brought")
    for one, other in combinations(names, 2):
        same = reports[one].requests.times == reports[other].requests.times
        require(not same, f"{one} and {other} are of the same run, which counts once")
    found = [by_variant(report.records()) for report in reports.values()]
    common = [key for key in found[0] if key[1] != BASELINE and all(key in own for own in found)]
    require(any(key[1] != CONTROL for key in common), f"{', '.join(names)} have no arm in common")
    arms, resampler = first.provenance.arms, Resampler(0)
    logs = {(metric, key): _logs(metric, key, found) for metric in METRICS for key in common}
    speed = list(_judge(logs, arms, resampler))
    return Merged(first.provenance.experiment["name"], [_run(name, report) for name, report in reports.items()], speed)


def _run(name: str, report: SavedReport) -> Run:
    machine = report.provenance.machine
    verdicts = dict.fromkeys(item.verdict for item in report.equality if item.arm not in (BASELINE, CONTROL))
    cpu, cpus = str(machine.get("cpu", "unknown")), machine.get("usable_cpus")
    return Run(name, report.provenance.date, cpu, cpus, len(report.requests.arm), list(verdicts))


def _logs(metric: str, key: Key, found: Sequence[Mapping[Key, Sequence[RequestRecord]]]) -> list[Logs]:
    """Of each run, by group."""
    logs: list[Logs] = []
    for own in found:
        base, ours = (values_by_turn(own[which], metric, None) for which in ((key[0], BASELINE, None), key))
        logs.append(log_ratios(base, ours, is_rate=metric == PRIMARY))
    return logs


def _judge(
    logs: Mapping[tuple[str, Key], Sequence[Logs]], arms: Mapping[str, Mapping[str, object]], resampler: Resampler
) -> Iterator[MergedSpeed]:
    """All but the control are one family, as in a report of one run."""
    groups = {at: [group for group in runs[0] if all(group in own for own in runs)] for at, runs in logs.items()}
    asks = {at: partial(pool, logs[at], groups[at], resampler) for at in logs if groups[at]}
    judged = {at: at[0] for at in asks if at[1][1] != CONTROL}
    verdicts = judge_together({at: asks[at] for at in judged}, judged, PRIMARY)
    for (metric, key), ask in asks.items():
        at = (metric, key)
        found = verdicts[at] if at in verdicts else not_judged(ask)
        batch, arm, length = key
        yield MergedSpeed(
            metric=metric,
            label=label_among(arms, arm, length),
            batch=batch,
            ratio=found.ratio,
            adjusted_p=found.decision.adjusted_p,
            verdict=found.decision.verdict,
            by_run=[exponential(resampler.mean([own[group] for group in groups[at]])) for own in logs[at]],
            agreement_p=agreement(logs[at], groups[at], resampler),
            left_out=len({group for own in logs[at] for group in own}) - len(groups[at]),
        )


def pool(runs: Sequence[Logs], groups: Sequence[int], resampler: Resampler, level: float = LEVEL) -> Estimate:
    """The mean over groups of the mean over runs."""
    return resampler.mean([math.fsum(own[group] for own in runs) / len(runs) for group in groups], level=level)


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
    tables = [
        TableData(header, [_speed_row(item) for item in merged.speed if item.metric == metric], metric)
        for metric in METRICS
        if any(item.metric == metric for item in merged.speed)
    ]
    notes = [
        "Ratios to plain of the same run, more than 1 is faster: by group of prompts the mean logarithm over"
        " repetitions, then over runs with equal weights. Intervals are over groups, of these machines: of each run 95%"
        ", of all runs at the level at which the verdict was tested. p they agree: of the largest difference between"
        " two runs, paired by group, Holm-corrected. p: of no effect, Holm-corrected over metrics, arms, lengths and"
        " batch sizes."
    ]
    if left_out := max(item.left_out for item in merged.speed):
        notes.append(f"Up to {left_out} groups are left out, which some run has not measured.")
    return [
        Section("Runs", [], [TableData(["", "report", "date", "machine", "requests", "equality"], runs)]),
        Section("Speed", notes, tables),
    ]


def _speed_row(item: MergedSpeed) -> list[str]:
    p_values = ["-" if p is None else f"{p:.3f}" for p in (item.agreement_p, item.adjusted_p)]
    estimates = [format_estimate(one, "{:.3f}") for one in (*item.by_run, item.ratio)]
    return [item.label, str(item.batch), *estimates[:-1], p_values[0], estimates[-1], p_values[1], item.verdict]
