"""What `--check` says before anything runs: how long it takes, and the smallest effect that it can show."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, stdev

import torch

from dovetail.spec_decode.experiments.arms import Setup, Variant
from dovetail.spec_decode.experiments.bootstrap import MIN_GROUPS, smallest_effect
from dovetail.spec_decode.experiments.datasets import DataSet
from dovetail.spec_decode.experiments.families import first_alpha
from dovetail.spec_decode.experiments.records import Key, RequestRecord, by_variant
from dovetail.spec_decode.experiments.saved_report import SavedReport
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL, Experiment
from dovetail.spec_decode.experiments.sequential import smallest_effect_at_any_look
from dovetail.spec_decode.experiments.speed import PRIMARY, log_ratios, values_by_turn

DEFAULT_SPREAD = (0.05, 0.15, 0.3)
"""Standard deviation over groups of the logarithm of a ratio, where no report says: prompts that are much alike and a
quiet machine, prompts of several kinds, a few prompts that gain much."""
_READ_BYTES = 256 << 20


@dataclass(frozen=True)
class Duration:
    """Of all turns, warm-up included; loading, checks of tokens and compatibility come on top."""

    minutes: float | None
    source: str
    """Where the number comes from; why there is none."""
    again: float = 0.0
    """Minutes more, where as many rounds as may are disturbed and run again."""


@dataclass(frozen=True)
class SmallestEffect:
    """What is decided four times out of five at one batch size."""

    batch: int
    groups: int
    ratios: Sequence[float]
    """One for each assumed spread; infinite where so few groups decide nothing."""


@dataclass(frozen=True)
class Foretold:
    """All of it."""

    duration: Duration
    spreads: Sequence[float]
    spread_source: str
    comparisons: int
    """Ratios in tokens/s that are judged."""
    effects: Sequence[SmallestEffect]
    until_decided: bool = False

    def lines(self) -> Iterator[str]:
        """For the terminal."""
        minutes = self.duration.minutes
        most = "at most " if self.until_decided else ""
        yield (
            f"{most}about {minutes:.1f} minutes of turns{self._again()}"
            if minutes is not None
            else "minutes: not known"
        )
        yield "  loading, the checks of tokens, the intervals and the table of compatibility take their time besides"
        yield f"  {self.duration.source}"
        spreads = ", ".join(f"{spread:.2f}" for spread in self.spreads)
        yield (
            f"smallest speed-up in tokens/s that is decided four times out of five, as one of {self.comparisons} after"
            f" correction{' and looks after every group' if self.until_decided else ''}, for a standard deviation over"
            f" groups of {spreads}"
        )
        yield f"  {self.spread_source}"
        for effect in self.effects:
            shown = ", ".join("none" if math.isinf(ratio) else f"{ratio:.2f}x" for ratio in effect.ratios)
            few = f" (fewer than {MIN_GROUPS} have no interval)" if effect.groups < MIN_GROUPS else ""
            yield f"  batch {effect.batch}, {effect.groups} groups{few}: {shown}"

    def _again(self) -> str:
        if not self.duration.minutes or not self.duration.again:
            return ""
        all_of_them = self.duration.minutes + self.duration.again
        return f", {all_of_them:.1f} where other processes disturb as many rounds as may run again (rerun_disturbed)"


def foretell(
    experiment: Experiment, setup: Setup, data: DataSet, earlier: SavedReport | None, *, until_decided: bool = False
) -> Foretold:
    """What the experiment takes and shows.

    Args:
        earlier: a report of the same experiment, or of one like it, which knows times and spread.
        until_decided: each group runs once at most, and is looked at when it has ended.
    """
    if until_decided:
        experiment = experiment.model_copy(update={"repetitions": 1, "rerun_disturbed": 0})
    variants = [variant for plan in setup.engines for variant in plan.variants]
    records = by_variant(earlier.records()) if earlier is not None else {}
    spreads, source = _spreads(records)
    comparisons = len(experiment.grid.batch_sizes) * sum(v.arm not in (BASELINE, CONTROL) for v in variants)
    alpha = first_alpha(comparisons)
    smallest = smallest_effect_at_any_look if until_decided else smallest_effect
    effects = []
    for batch in experiment.grid.batch_sizes:
        groups = -(-len(data.prompts) // batch)
        needed = smallest(groups, alpha)
        effects.append(SmallestEffect(batch, groups, [_ratio(needed * spread) for spread in spreads]))
    if earlier is not None:
        duration = _as_before(experiment, variants, data.num_requests, earlier, records)
    else:
        duration = _by_reading_weights(experiment, setup, variants, data.num_requests)
    return Foretold(duration, spreads, source, comparisons, effects, until_decided)


def _ratio(log: float) -> float:
    return math.exp(log) if log < 10 else math.inf


def _spreads(records: Mapping[Key, Sequence[RequestRecord]]) -> tuple[Sequence[float], str]:
    found = []
    for key, own in records.items():
        base = records.get((key[0], BASELINE, None))
        if base is None or key[1] in (BASELINE, CONTROL):
            continue
        values = [values_by_turn(records, PRIMARY, None) for records in (base, own)]
        logs = list(log_ratios(values[0], values[1], is_rate=True).values())
        if len(logs) >= MIN_GROUPS:
            found.append(stdev(logs))
    if not found:
        return DEFAULT_SPREAD, "assumed: small, usual and large; --from REPORT.json takes it from an earlier report"
    return (min(found), median(found), max(found)), "smallest, middle and largest of the earlier report's arms"


def _num_turns(experiment: Experiment, batch: int, num_requests: int) -> int:
    """Of one variant."""
    return experiment.warmup + experiment.repetitions * -(-num_requests // batch)


def _num_turns_again(experiment: Experiment, batch: int, num_requests: int) -> int:
    """Of one variant, at most: rounds that are disturbed run again."""
    return experiment.repetitions * min(experiment.rerun_disturbed, -(-num_requests // batch))


def _as_before(
    experiment: Experiment,
    variants: Sequence[Variant],
    num_requests: int,
    earlier: SavedReport,
    records: Mapping[Key, Sequence[RequestRecord]],
) -> Duration:
    """By the mean seconds of a turn in the earlier report, of the same variant and batch size as far as it has them."""
    seconds = {key: _seconds_per_turn(own) for key, own in records.items()}
    if not seconds:
        return Duration(None, "the earlier report has no requests")
    before = earlier.provenance.experiment.get("sampling", {}).get("max_tokens", experiment.sampling.max_tokens)
    total, again, unknown = 0.0, 0.0, []
    for batch in experiment.grid.batch_sizes:
        nearest = min({key[0] for key in seconds}, key=lambda known: abs(math.log(known / batch)))
        alike = [own for key, own in seconds.items() if key[0] == nearest]
        for variant in variants:
            own = seconds.get((batch, variant.arm, variant.length))
            if own is None:
                unknown.append(f"{variant.label}, batch {batch}")
            turn = own if own is not None else sum(alike) / len(alike)
            total += turn * _num_turns(experiment, batch, num_requests)
            again += turn * _num_turns_again(experiment, batch, num_requests)
    scale = experiment.sampling.max_tokens / before / 60
    scaled = "" if before == experiment.sampling.max_tokens else f", scaled from {before} output tokens"
    guessed = f"; as the mean of others: {', '.join(unknown)}" if unknown else ""
    return Duration(
        total * scale,
        f"from the turns of the earlier report of {earlier.provenance.date}{scaled}{guessed}",
        again * scale,
    )


def _seconds_per_turn(records: Sequence[RequestRecord]) -> float:
    turns: dict[tuple[int, int], float] = {}
    for record in records:
        turn = record.repetition, record.group
        turns[turn] = max(turns.get(turn, 0.0), record.e2e)
    return sum(turns.values()) / len(turns)


def _by_reading_weights(
    experiment: Experiment, setup: Setup, variants: Sequence[Variant], num_requests: int
) -> Duration:
    """Each decode step reads all weights once, at the speed at which this machine's memory is read just now."""
    plan = setup.engines[0]
    estimate = plan.explanation.estimate
    if estimate is None or plan.resolved.device_type != "cpu":
        return Duration(None, "--from REPORT.json takes them from an earlier report of this machine")
    rate = _read_rate()
    step = estimate.weight_bytes / rate
    turns, again = (
        sum(count(experiment, batch, num_requests) for batch in experiment.grid.batch_sizes)
        for count in (_num_turns, _num_turns_again)
    )
    turn = len(variants) * experiment.sampling.max_tokens * step / 60
    return Duration(
        turns * turn,
        f"an estimate without any measured step: {experiment.sampling.max_tokens} decode steps a turn, each reading the"
        f" weights once at {rate / 1e9:.1f} GB/s, measured just now; prompts, larger batches and drafting take more,"
        " accepted drafts less. --from REPORT.json is better",
        again * turn,
    )


def _read_rate() -> float:
    """Bytes per second of a sum over memory that no cache holds; the best of three."""
    values = torch.ones(_READ_BYTES // 4)
    rates = []
    for _ in range(3):
        start = time.perf_counter()
        values.sum()
        rates.append(_READ_BYTES / (time.perf_counter() - start))
    return max(rates)
