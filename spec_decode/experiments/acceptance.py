"""Acceptance: rates and lengths by their definitions, over prompts as clusters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dovetail.spec_decode.experiments.bootstrap import MIN_GROUPS, Estimate
from dovetail.spec_decode.experiments.rates import affine, mean_share, share
from dovetail.spec_decode.experiments.records import RequestRecord, by_conversation, by_prompt, by_variant

DEFINITIONS: Mapping[str, str] = {
    "rate (ratio of sums)": "accepted drafts / drafted tokens, summed over all requests",
    "rate (mean over requests)": "mean of each request's own accepted / drafted; requests without drafts left out",
    "accepted length": "tokens per decode step, bonus token included, over all decode steps, with drafts or not",
    "round length": "tokens per round, bonus token included, where a round is a step in which drafts of the request"
    " were verified: 1 + accepted / rounds, as metrics.mean_accepted_length and vLLM's mean acceptance length",
    "drafted per step": "drafted tokens per decode step: below the draft length where a drafter had nothing to guess",
    "at position j, of steps": "share of all decode steps in which at least j draft tokens were accepted",
    "at position j, of rounds": "share of rounds in which at least j draft tokens were accepted, as in vLLM",
    "at position j, of drafts": "share of rounds in which at least j draft tokens were accepted, among those with at"
    " least j verified in a row (metrics.accepted_per_position / metrics.drafted_per_position, as --stats prints)",
    "wasted": "draft tokens that were verified and rejected, per output token",
    "interval": "95%, over prompts (all requests of a prompt, and of later turns of its conversation, together)"
    ": Student's t on the logit of the share, with the"
    " delete-one jackknife's error, so that no end is beyond what can be; none where fewer than"
    f" {MIN_GROUPS} prompts drafted",
}

_LEARNED = 0.02
"""Rise of the acceptance rate, and share by which a step brings more, beyond which a drafter has learned."""


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of one variant at one batch size, for all categories or one."""

    arm: str
    length: int | None
    batch: int
    category: str | None
    """None: all."""
    drafted: int
    accepted: int
    decode_steps: int
    rate: Estimate | None
    """None where no tokens were drafted."""
    rate_of_requests: Estimate | None
    accepted_length: Estimate | None
    """Tokens per decode step."""
    rounds: int
    """Steps in which drafts were verified, by request."""
    round_length: Estimate | None
    """Tokens per round."""
    drafted_per_step: float | None
    positions: Sequence[float]
    """Share of decode steps with at least 1, 2, ... accepted drafts."""
    positions_of_rounds: Sequence[float]
    """Share of rounds with at least 1, 2, ... accepted drafts."""
    positions_of_drafts: Sequence[float | None]
    """Share of the rounds in which as many drafts in a row were verified; None where there was none."""
    wasted: float
    by_repetition: Sequence[float | None]
    """Rate (ratio of sums) of each repetition."""


def describe_acceptance(records: Sequence[RequestRecord]) -> list[Acceptance]:
    """Returns every variant that drafts, at each batch size: all categories, then each."""
    found = []
    for (batch, arm, length), own in by_variant(records).items():
        if length is None:
            continue
        found.append(_describe(arm, length, batch, None, own))
        categories = dict.fromkeys(record.category for record in own)
        for category in categories if len(categories) > 1 else ():
            part = [record for record in own if record.category == category]
            found.append(_describe(arm, length, batch, category, part))
    return found


def _describe(arm: str, length: int, batch: int, category: str | None, records: Sequence[RequestRecord]) -> Acceptance:
    drafted, accepted = sum(r.drafted for r in records), sum(r.accepted for r in records)
    steps, rounds = sum(r.decode_steps for r in records), sum(r.rounds for r in records)
    accepted_at, verified_at = (
        _counts(counts, length)
        for counts in ([r.accepted_per_position for r in records], [r.drafted_per_position for r in records])
    )
    own_rates = [_mean([r.accepted / r.drafted for r in own if r.drafted]) for own in by_conversation(records).values()]
    means = [rate for rate in own_rates if rate is not None]
    # Tokens that a grammar forces are drafted beyond an arm's own length.
    most = max([length, *(len(r.drafted_per_position) for r in records)])
    return Acceptance(
        arm,
        length,
        batch,
        category,
        drafted,
        accepted,
        steps,
        _share(records, lambda r: r.accepted, lambda r: r.drafted),
        mean_share(means, drafted) if means else None,
        _length(records, lambda r: r.decode_tokens, lambda r: r.decode_steps, most),
        rounds,
        _length(records, lambda r: r.rounds + r.accepted, lambda r: r.rounds, most),
        drafted / steps if steps else None,
        [count / steps for count in accepted_at] if steps else [],
        [count / rounds for count in accepted_at] if rounds else [],
        [count / most if most else None for count, most in zip(accepted_at, verified_at, strict=True)],
        (drafted - accepted) / sum(len(r.token_ids) for r in records),
        [_rate([r for r in records if r.repetition == n]) for n in sorted({r.repetition for r in records})],
    )


_Count = Callable[[RequestRecord], int]


def _share(records: Sequence[RequestRecord], part: _Count, whole: _Count) -> Estimate | None:
    clusters = by_conversation(records).values()
    parts, wholes = ([float(sum(map(count, own))) for own in clusters] for count in (part, whole))
    return share(parts, wholes) if sum(wholes) else None


def _length(records: Sequence[RequestRecord], tokens: _Count, steps: _Count, most_drafts: int) -> Estimate | None:
    """Tokens per step, between 1 and 1 + `most_drafts`; without an interval where few prompts drafted."""
    found = _share(records, lambda r: tokens(r) - steps(r), lambda r: most_drafts * steps(r))
    if found is None:
        return None
    length = affine(found, most_drafts, 1.0)
    num_drafting = sum(any(r.drafted for r in own) for own in by_conversation(records).values())
    return length if num_drafting >= MIN_GROUPS else replace(length, low=None, high=None)


def _counts(lists: Sequence[Sequence[int]], length: int) -> list[int]:
    """Returns sums by position."""
    counts = [0] * length
    for own in lists:
        for position, count in enumerate(own):
            counts[position] += count
    return counts


def _rate(records: Sequence[RequestRecord]) -> float | None:
    drafted = sum(record.drafted for record in records)
    return sum(record.accepted for record in records) / drafted if drafted else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def meetings(records: Sequence[RequestRecord]) -> tuple[list[RequestRecord], list[RequestRecord]]:
    """Returns the first request of each prompt that one variant ran more than once at one batch size, and the later
    ones.

    Prompts run again in each repetition, and where they fill up the last group.
    """
    repeated = [own for own in by_prompt(records).values() if len(own) > 1]
    return [own[0] for own in repeated], [record for own in repeated for record in own[1:]]


def learned_rates(before: Sequence[RequestRecord], after: Sequence[RequestRecord]) -> tuple[float, float] | None:
    """Returns the acceptance rates of first and later greedy requests for the same prompts, where the later ones show
    that the drafter used its own answers; else None.

    The text is the same, so a drafter that keeps no answers drafts it no better. One whose length adapts may draft
    less, so that its rate rises, but not the tokens that a step brings: both must.
    """
    rates, steps = (_rate(before), _rate(after)), (_tokens_per_step(before), _tokens_per_step(after))
    if rates[0] is None or rates[1] is None or steps[0] is None or steps[1] is None:
        return None
    has_learned = rates[1] > rates[0] + _LEARNED and steps[1] > steps[0] * (1 + _LEARNED)
    return (rates[0], rates[1]) if has_learned else None


def _tokens_per_step(records: Sequence[RequestRecord]) -> float | None:
    steps = sum(record.decode_steps for record in records)
    return sum(record.decode_tokens for record in records) / steps if steps else None
