"""What makes a comparison on live traffic doubtful, each in a sentence that says what to do."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.spec_decode.experiments.bootstrap import MIN_GROUPS, Estimate, Resampler, multinomial_p
from dovetail.spec_decode.experiments.families import exponential
from dovetail.spec_decode.experiments.live.compare import Arms, grouped, log_ratio
from dovetail.spec_decode.experiments.live.records import LiveTraffic
from dovetail.spec_decode.experiments.speed import PER_REQUEST

FEW_UNITS = 12
"""With fewer the intervals of skewed times are less exact."""
_MISMATCH = 0.001
"""Of so many fair draws, one gets a warning."""
_TREND = 0.01
_MIXED = 0.05
"""Share of requests that ran together with other arms', beyond which a time is no longer one arm's."""


def find_warnings(traffic: LiveTraffic, arms: Arms, resampler: Resampler) -> list[str]:
    """All of them, what matters most first."""
    return [
        *_mismatch(traffic, arms),
        *_few_units(traffic, arms),
        *_interference(traffic),
        *_trend(arms, resampler),
        *_unfinished(arms, resampler),
        *_changes(traffic, arms),
        *_losses(traffic),
    ]


def _mismatch(traffic: LiveTraffic, arms: Arms) -> Iterator[str]:
    """Sample-ratio mismatch: arms that lost, or never got, units."""
    shares = {arm.name: arm.share for arm in traffic.design.arms}
    counts = [len({record.unit for record in records}) for records in arms.values()]
    p = multinomial_p(counts, [shares[arm] for arm in arms])
    if p < _MISMATCH:
        told = ", ".join(
            f"{arm} {count} ({count / sum(counts):.1%}, not {shares[arm]:.1%})"
            for arm, count in zip(arms, counts, strict=True)
        )
        yield (
            f"sample-ratio mismatch: {_units(traffic)} of arms are not in their shares (p = {p:.4f}): {told}. Something"
            " keeps requests of one arm from being recorded: trust no comparison before you know what"
        )


def _few_units(traffic: LiveTraffic, arms: Arms) -> Iterator[str]:
    counts = {arm: len({record.unit for record in records}) for arm, records in arms.items()}
    few = {arm: count for arm, count in counts.items() if count < FEW_UNITS}
    if few:
        told = ", ".join(f"{arm} has {count}" for arm, count in few.items())
        none = f"; there is no interval with fewer than {MIN_GROUPS}" if min(few.values()) < MIN_GROUPS else ""
        yield f"few {_units(traffic)}: {told}{none}. Let it run on"


def _interference(traffic: LiveTraffic) -> Iterator[str]:
    mixed = sum(record.num_others > 0 for record in traffic.records) / len(traffic.records)
    if mixed <= _MIXED:
        return
    told = (
        f"arms interfere: {mixed:.0%} of the requests came while requests of others than their arm were under way. All"
        " share the steps of one engine, so that an arm that is slower slows the others too: ratios of times are drawn"
        " towards 1"
    )
    if traffic.design.unit == "slice":
        yield f"{told}, here at the ends of slices: raise slice_s, and traffic to 1"
    else:
        yield f"{told} (acceptance is not concerned): draw slices of time, unit: slice"


def _trend(arms: Arms, resampler: Resampler) -> Iterator[str]:
    """Compares the halves of the time with each other."""
    times = sorted(record.time for records in arms.values() for record in records)
    middle = times[len(times) // 2]
    halves = [
        {arm: [record for record in records if (record.time < middle) is is_first] for arm, records in arms.items()}
        for is_first in (True, False)
    ]
    baseline, *others = arms
    level = log_ratio(PER_REQUEST, halves[1][baseline], halves[0][baseline], resampler)
    if level is not None and level.p is not None and level.p < _TREND:
        yield (
            f"time trend: {baseline} itself had {exponential(level).value:.2f}x the speed in the second half of the"
            f" time ({PER_REQUEST}). Arms that were drawn at the same times are compared rightly all the same;"
            " intervals assume units that do not follow each other"
        )
    for arm in others:
        ratios = [log_ratio(PER_REQUEST, half[arm], half[baseline], resampler) for half in halves]
        if _differ(*ratios):
            first, second = (exponential(ratio).value for ratio in ratios if ratio is not None)
            yield (
                f"time trend: {arm} had {first:.2f}x the speed of {baseline} in the first half of the time and"
                f" {second:.2f}x in the second: the ratio over all of it describes neither"
            )


def _differ(one: Estimate | None, other: Estimate | None) -> bool:
    """Whether two independent estimates differ by more than their standard errors explain (normal approximation)."""
    if one is None or other is None or one.error is None or other.error is None:
        return False
    spread = (one.error**2 + other.error**2) ** 0.5
    return spread > 0 and abs(one.value - other.value) / spread > _TREND_SCORE


_TREND_SCORE = 2.807
"""Standard errors that a normal deviate exceeds one time in 200."""


def _unfinished(arms: Arms, resampler: Resampler) -> Iterator[str]:
    baseline, *others = arms
    for arm in others:
        sums = [
            grouped(arms[name], lambda record: float(not record.is_finished), lambda record: 1.0)
            for name in (arm, baseline)
        ]
        if not all(top for top, _ in sums):
            continue
        found = resampler.difference(sums[0], sums[1])
        if found.p is not None and found.p < _TREND:
            own, base = (sum(top) / sum(bottom) for top, bottom in sums)
            yield (
                f"{own:.1%} of the requests of {arm} were aborted or failed, and {base:.1%} of {baseline}: times are of"
                " those that came to their end, which need not be alike"
            )


def _changes(traffic: LiveTraffic, arms: Arms) -> Iterator[str]:
    versions = {record.weight_version for record in traffic.records}
    if len(versions) > 1:
        yield (
            f"the weights were replaced meanwhile (versions {min(versions)} to {max(versions)}): arms may differ by it"
        )
    for arm, records in arms.items():
        count = sum(record.drafter_error for record in records)
        if count:
            yield f"the drafter of {arm} raised: {count} of {len(records)} requests went on without it"


def _losses(traffic: LiveTraffic) -> Iterator[str]:
    if traffic.num_of_other_designs:
        yield (
            f"{traffic.num_of_other_designs} requests of {traffic.design.name} are left out: the experiment was"
            " configured otherwise then"
        )
    if traffic.num_lost:
        yield f"{traffic.num_lost} lines could not be written, and are missing"
    if traffic.num_broken:
        yield f"{traffic.num_broken} lines of {traffic.path} cannot be read, and are left out"


def _units(traffic: LiveTraffic) -> str:
    return f"{traffic.design.unit}s"
