"""How many drafts stood: rates and lengths by their definitions, over prompts as clusters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dovetail.spec_decode.experiments.bootstrap import Estimate, Resampler
from dovetail.spec_decode.experiments.records import RequestRecord, by_prompt, by_variant

DEFINITIONS: Mapping[str, str] = {
    "rate (ratio of sums)": "accepted drafts / drafted tokens, summed over all requests",
    "rate (mean over requests)": "mean of each request's own accepted / drafted; requests without drafts left out",
    "accepted length": "tokens per decode step, bonus token included, summed over all requests",
    "drafted per step": "drafted tokens per decode step: below the draft length where a drafter had nothing to guess",
    "at position j": "share of decode steps in which at least j drafts stood",
    "wasted": "drafts that were verified and did not stand, per output token",
    "interval": "95%, bootstrap over prompts (all requests of a prompt together), see the speed section for the method",
}


@dataclass(frozen=True)
class Acceptance:
    """One variant at one batch size, of all categories or one."""

    arm: str
    length: int | None
    batch: int
    category: str | None
    """None: all."""
    drafted: int
    accepted: int
    decode_steps: int
    rate: Estimate | None
    """None where nothing was drafted."""
    rate_of_requests: Estimate | None
    accepted_length: Estimate | None
    drafted_per_step: float | None
    positions: Sequence[float]
    """Share of decode steps with at least 1, 2, ... accepted drafts."""
    wasted: float
    by_repetition: Sequence[float | None]
    """Rate (ratio of sums) of each repetition."""


def describe_acceptance(records: Sequence[RequestRecord], resampler: Resampler) -> list[Acceptance]:
    """Every variant that drafts, at each batch size: all categories, then each."""
    found = []
    for (batch, arm, length), own in by_variant(records).items():
        if length is None:
            continue
        found.append(_describe(arm, length, batch, None, own, resampler))
        categories = dict.fromkeys(record.category for record in own)
        for category in categories if len(categories) > 1 else ():
            part = [record for record in own if record.category == category]
            found.append(_describe(arm, length, batch, category, part, resampler))
    return found


def _describe(
    arm: str,
    length: int,
    batch: int,
    category: str | None,
    records: Sequence[RequestRecord],
    resampler: Resampler,
) -> Acceptance:
    drafted, accepted = sum(r.drafted for r in records), sum(r.accepted for r in records)
    steps = sum(r.decode_steps for r in records)
    own_rates = [_mean([r.accepted / r.drafted for r in own if r.drafted]) for own in by_prompt(records).values()]
    means = [rate for rate in own_rates if rate is not None]
    return Acceptance(
        arm,
        length,
        batch,
        category,
        drafted,
        accepted,
        steps,
        _ratio(records, lambda r: r.accepted, lambda r: r.drafted, resampler),
        resampler.mean(means) if means else None,
        _ratio(records, lambda r: r.decode_tokens, lambda r: r.decode_steps, resampler),
        drafted / steps if steps else None,
        _positions(records, length, steps),
        (drafted - accepted) / sum(len(r.token_ids) for r in records),
        [_rate([r for r in records if r.repetition == n]) for n in sorted({r.repetition for r in records})],
    )


def _ratio(
    records: Sequence[RequestRecord],
    top: Callable[[RequestRecord], int],
    bottom: Callable[[RequestRecord], int],
    resampler: Resampler,
) -> Estimate | None:
    clusters = by_prompt(records).values()
    tops = [float(sum(map(top, own))) for own in clusters]
    bottoms = [float(sum(map(bottom, own))) for own in clusters]
    return resampler.ratio(tops, bottoms) if sum(bottoms) else None


def _positions(records: Sequence[RequestRecord], length: int, steps: int) -> list[float]:
    counts = [0] * length
    for record in records:
        for position, count in enumerate(record.accepted_per_position):
            counts[position] += count
    return [count / steps for count in counts] if steps else []


def _rate(records: Sequence[RequestRecord]) -> float | None:
    drafted = sum(record.drafted for record in records)
    return sum(record.accepted for record in records) / drafted if drafted else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def learns_from_history(acceptance: Acceptance, *, is_greedy: bool) -> bool:
    """Whether a greedy variant's rate rises from one repetition to the next.

    The prompts are the same and so is the text, so a drafter that keeps nothing accepts the same each time. One
    that keeps finished requests has seen its own answers by the second repetition.
    """
    rates = [rate for rate in acceptance.by_repetition if rate is not None]
    return is_greedy and len(rates) > 1 and rates[-1] > rates[0] + 0.02
