"""Compares two reports of one experiment: regressions, with intervals.

Speed is compared as the speed-up over the plain arm of the same run, group by group, so that a machine that is faster
today cancels. Acceptance is compared prompt by prompt.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from dovetail.commands.checks import require
from dovetail.commands.saved import differences, shortened
from dovetail.contracts.errors import ConfigError
from dovetail.spec_decode.experiments.bootstrap import LEVEL, Estimate, Resampler, step_down
from dovetail.spec_decode.experiments.families import Ask, exponential
from dovetail.spec_decode.experiments.rates import within
from dovetail.spec_decode.experiments.records import Key, RequestRecord, by_prompt, by_variant, label_among
from dovetail.spec_decode.experiments.saved_report import SavedEquality, SavedProvenance, SavedReport
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL
from dovetail.spec_decode.experiments.speed import METRICS, PRIMARY, log_ratios, values_by_turn

Verdict = Literal["better", "worse", "same", "undecided"]

_COMPARABLE = ("experiment", "model", "workload")
"""Parts of the provenance that must be equal."""
_PASSED_OVER = frozenset(
    {
        "name",
        "baseline",
        "arms",
        "repetitions",
        "rerun_disturbed",
        "warmup",
        "order",
        "compatibility",
        "keep_going",
        "config",
    }
)
"""Keys of the experiment that may differ: what is under test, or how often it was measured."""


@dataclass(frozen=True)
class Change:
    """One quantity of one variant at one batch size."""

    label: str
    what: str
    old: float | str
    new: float | str
    estimate: Estimate | None
    """new / old for speed-ups (more than 1: better), new - old for acceptance; None for verdicts. Its interval leaves
    no change out if and only if the verdict is better or worse."""
    verdict: Verdict
    """same: no difference, in any group or prompt."""


@dataclass(frozen=True)
class Comparison:
    """The comparison of two reports."""

    old: str
    new: str
    changes: Sequence[Change]
    differences: Sequence[str]
    """Facts that differ between the reports; allowed, or harmless."""


def comparison_json(comparison: Comparison) -> str:
    """Returns a comparison as the text of a JSON file."""
    return json.dumps({"dovetail_ab_comparison": 1, **asdict(comparison)}, indent=1) + "\n"


def compare_reports(old: SavedReport, new: SavedReport, names: tuple[str, str], *, allow: bool) -> Comparison:
    """Compares two reports. Raises `ConfigError` where the experiments differ or a run ended by what it saw, unless
    `allow` is set."""
    differing = list(experiment_differences(old, new, _PASSED_OVER))
    if differing and not allow:
        raise ConfigError(
            f"{names[0]} and {names[1]} are not of one experiment: {'; '.join(differing)}. Measure the same, or compare"
            " what they have in common with --allow"
        )
    for name, one in zip(names, (old, new), strict=True):
        if one.ended_by_itself:
            what = f"{name} was run until it was decided: its number of groups depends on what they brought"
            require(allow, f"{what}, and the intervals of a comparison do not; --allow compares it all the same")
            differing.append(f"{what}; intervals and verdicts do not allow for that")
    records = by_variant(old.records()), by_variant(new.records())
    judged = [key for key in records[0] if key[1] not in (BASELINE, CONTROL)]
    common = [key for key in judged if key in records[1]]
    gone = _gone(old, new, judged, records[1])
    require(bool(common or gone), f"{names[0]} and {names[1]} have no arm in common that drafts or differs from plain")
    resampler = Resampler(0).finest((1 - LEVEL) / max(1, len(METRICS) * len(common)))

    def label(key: Key) -> str:
        batch, arm, length = key
        return f"{label_among(old.provenance.arms, arm, length)}, batch {batch}"

    changes = [
        *_decide([_speed_change(metric, key, *records, resampler, label) for metric in METRICS for key in common]),
        *_decide(
            [
                _acceptance_change(what, values, key, *records, resampler, label)
                for what, values in _ACCEPTANCE.items()
                for key in common
                if key[2] is not None
            ]
        ),
        *_equality_changes(old, new, common, label),
        *_drafter_changes(common, *records, label),
        *(Change(label(key), "arm", "ran", "is gone", None, "worse") for key in gone),
    ]
    return Comparison(*names, changes, [*differing, *_environment(old.provenance, new.provenance)])


Records = Mapping[Key, Sequence[RequestRecord]]
Label = Callable[[Key], str]


@dataclass(frozen=True)
class _Question:
    """A change before it is judged."""

    change: Change
    ask: Ask
    """The estimate that is shown, with the interval of a level."""

    @property
    def when_decided(self) -> Verdict:
        """The verdict, if there is one."""
        assert not isinstance(self.change.old, str)
        assert not isinstance(self.change.new, str)
        return "better" if self.change.new > self.change.old else "worse"


def _speed_change(
    metric: str, key: Key, old: Records, new: Records, resampler: Resampler, label: Label
) -> _Question | None:
    ratios = [_speedups(metric, key, records) for records in (old, new)]
    groups = [group for group in ratios[0] if group in ratios[1]]
    if not groups:
        return None
    before, after = (math.exp(sum(own[group] for group in groups) / len(groups)) for own in ratios)
    differences = [ratios[1][group] - ratios[0][group] for group in groups]

    def ask(level: float) -> Estimate:
        return exponential(resampler.mean(differences, level=level))

    change = Change(label(key), f"speed-up in {metric}", before, after, ask(LEVEL), _undecided(differences))
    return _Question(change, ask)


def _undecided(differences: Sequence[float]) -> Verdict:
    return "undecided" if any(differences) else "same"


def _speedups(metric: str, key: Key, records: Records) -> dict[int, float]:
    """Returns the log speed-up over plain, by group."""
    base = values_by_turn(records[key[0], BASELINE, None], metric, None)
    own = values_by_turn(records[key], metric, None)
    return log_ratios(base, own, is_rate=metric == PRIMARY)


def _acceptance_change(
    what: str,
    values_of: Callable[[Sequence[RequestRecord]], dict[int, float]],
    key: Key,
    old: Records,
    new: Records,
    resampler: Resampler,
    label: Label,
) -> _Question | None:
    values = [values_of(records[key]) for records in (old, new)]
    prompts = [prompt for prompt in values[0] if prompt in values[1]]
    if not prompts:
        return None
    before, after = (sum(own[prompt] for prompt in prompts) / len(prompts) for own in values)
    differences = [values[1][prompt] - values[0][prompt] for prompt in prompts]
    furthest = _longest(key, (old, new)) if values_of is _lengths else 1.0

    def ask(level: float) -> Estimate:
        return within(resampler.mean(differences, level=level), -furthest, furthest)

    return _Question(Change(label(key), what, before, after, ask(LEVEL), _undecided(differences)), ask)


def _longest(key: Key, records: tuple[Records, Records]) -> float:
    """The most drafts of a round, by which two accepted lengths differ at most."""
    return max([key[2] or 0, *(len(record.drafted_per_position) for own in records for record in own[key])])


def _rates(records: Sequence[RequestRecord]) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for record in records:
        if record.drafted:
            found.setdefault(record.prompt, []).append(record.accepted / record.drafted)
    return {prompt: sum(rates) / len(rates) for prompt, rates in found.items()}


def _lengths(records: Sequence[RequestRecord]) -> dict[int, float]:
    """Tokens per decode step of each prompt. A drafter that drafts less at the same rate is seen here alone."""
    found = {}
    for prompt, own in by_prompt(records).items():
        steps = sum(record.decode_steps for record in own)
        if steps:
            found[prompt] = sum(record.decode_tokens for record in own) / steps
    return found


_ACCEPTANCE: Mapping[str, Callable[[Sequence[RequestRecord]], dict[int, float]]] = {
    "acceptance rate (mean over prompts)": _rates,
    "accepted length (tokens per decode step, mean over prompts)": _lengths,
}


def _decide(found: Sequence[_Question | None]) -> Iterator[Change]:
    """Holm over all of them, and intervals that agree with the verdicts: of the level at which each was tested."""
    questions = [question for question in found if question is not None]
    estimates = [question.change.estimate for question in questions]
    p_values = {i: own.p for i, own in enumerate(estimates) if own is not None and own.p is not None}
    steps = step_down(p_values, dict.fromkeys(p_values, 1.0))
    for index, question in enumerate(questions):
        change = question.change
        if index in steps:
            change = replace(change, estimate=question.ask(1 - steps[index].alpha))
            if p_values[index] < steps[index].alpha:
                change = replace(change, verdict=question.when_decided)
        yield change


def _equality_changes(old: SavedReport, new: SavedReport, common: Sequence[Key], label: Label) -> Iterator[Change]:
    before = {(e.batch, e.arm, e.length): e for e in old.equality}
    after = {(e.batch, e.arm, e.length): e for e in new.equality}
    for key in common:
        if key not in before or key not in after or before[key].verdict == after[key].verdict:
            continue
        verdict = _equality_verdict(before[key], after[key])
        yield Change(label(key), "equality", before[key].verdict, after[key].verdict, None, verdict)


def _equality_verdict(before: SavedEquality, after: SavedEquality) -> Verdict:
    """Returns the verdict on equality: tokens that equalled plain's and no longer do are a regression, unless plain's
    own tokens changed likewise."""
    if after.verdict == "LOSSY":
        return "worse"
    if before.verdict == "identical" and after.divergences:
        return "undecided" if after.control_diverged else "worse"
    return "better" if before.verdict == "LOSSY" or after.verdict == "identical" else "undecided"


def _gone(old: SavedReport, new: SavedReport, judged: Sequence[Key], now: Records) -> list[Key]:
    """What only the old report measured. Of an arm that is still there, other batch sizes and lengths are no loss where
    the new experiment asks for others."""
    arms = {key[1] for key in now}
    is_same_grid = old.provenance.experiment.get("grid") == new.provenance.experiment.get("grid")
    return [key for key in judged if key not in now and (is_same_grid or key[1] not in arms)]


def _drafter_changes(common: Sequence[Key], old: Records, new: Records, label: Label) -> Iterator[Change]:
    for key in common:
        before, after = (
            next((record.drafter_error for record in records[key] if record.drafter_error is not None), None)
            for records in (old, new)
        )
        if (before is None) != (after is None):
            verdict: Verdict = "worse" if before is None else "better"
            yield Change(label(key), "drafter", before or "ran", after or "ran", None, verdict)


def experiment_differences(old: SavedReport, new: SavedReport, allowed: Set[str]) -> Iterator[str]:
    """In what two reports' experiments, models and prompts differ, files of equal contents aside. `allowed`: keys of
    the experiment that may."""
    passed_over = _places(old.provenance, new.provenance)
    for part in _COMPARABLE:
        one, other = old.provenance.model_dump()[part], new.provenance.model_dump()[part]
        for key in dict.fromkeys([*one, *other]):
            if (part, key) in passed_over or (part == "experiment" and key in allowed):
                continue
            before, after = _without_data(one, key, passed_over), _without_data(other, key, passed_over)
            if before != after:
                yield from differences(before, after, name=f"{part}.{key}")


def _places(old: SavedProvenance, new: SavedProvenance) -> frozenset[tuple[str, str]]:
    """Keys that say where files lay, for files whose contents are equal."""
    found: set[tuple[str, str]] = set()
    digest = old.model.get("sampled_sha256")
    if digest is not None and digest == new.model.get("sampled_sha256"):
        found |= {("model", key) for key in ("path", "revision", "files")}
    digest = old.workload.get("sha256")
    if digest is not None and digest == new.workload.get("sha256"):
        found.add(("workload", "data"))
    return frozenset(found)


def _without_data(part: Mapping[str, Any], key: str, passed_over: Set[tuple[str, str]]) -> Any:
    value = part.get(key)
    if key == "workload" and ("workload", "data") in passed_over and isinstance(value, Mapping):
        return {name: item for name, item in value.items() if name != "data"}
    return value


def _environment(old: SavedProvenance, new: SavedProvenance) -> Iterator[str]:
    for part, key in sorted(_places(old, new)):
        one, other = old.model_dump()[part].get(key), new.model_dump()[part].get(key)
        if one != other:
            yield f"{part}.{key}: {shortened(one)} / {shortened(other)}, of equal contents"
    yield from differences(old.machine, new.machine, name="machine", skip=frozenset({"load_average", "cpu_mhz"}))
    yield from differences(old.arms, new.arms, name="arms")
