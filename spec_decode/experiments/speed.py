"""Speed ratios: paired by the prompts that ran together, over repetitions, with intervals and verdicts.

A ratio compares one group of prompts in an arm with the same group in the baseline, in the same repetition; it is
turned so that more than 1 is better. Its logarithm is averaged over repetitions, and groups are what the bootstrap
draws, since requests in flight together share whatever happens meanwhile. Groups that hold turns of the same
conversations are averaged as well, and count as one. Values shown are geometric means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dovetail.commands.checks import nearest
from dovetail.contracts.errors import ConfigError
from dovetail.spec_decode.experiments.bootstrap import Estimate, Resampler
from dovetail.spec_decode.experiments.families import (
    Ask,
    Decision,
    Judged,
    Verdict,
    ask_mean,
    judge_together,
    not_judged,
    smallest_alpha,
)
from dovetail.spec_decode.experiments.records import Key, RequestRecord, by_variant, clusters_of_groups
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL

METRICS: Mapping[str, str] = {
    "tokens/s": "output tokens of a group / seconds from its start to its last token",
    "e2e": "seconds until a request's last token, mean over the group",
    "itl": "seconds per token after the first, mean over the group's requests",
    "ttft": "seconds until a request's first token, mean over the group",
}
PRIMARY = "tokens/s"
PER_REQUEST = "tokens/s of a request"
"""Of categories: output tokens of their requests / the sum of these requests' seconds. At batch 1 it is `PRIMARY`."""
PAIRS = "pairs of arms"

VariantKey = tuple[str, int | None]
"""Arm and draft length."""
PLAIN: VariantKey = (BASELINE, None)


@dataclass(frozen=True)
class Speed:
    """One metric of one variant at one batch size, compared with the baseline; of the control, with plain."""

    metric: str
    arm: str
    length: int | None
    batch: int
    category: str | None
    """None: all."""
    baseline: float
    """Geometric mean over groups and repetitions: tokens/s, or seconds."""
    own: float
    ratio: Estimate
    """More than 1 is better; `error` is that of the logarithm. The interval leaves 1 out if and only if the verdict is
    faster or slower; of what is not judged it is a 95% interval."""
    adjusted_p: float | None
    """After Holm, over all ratios of the report that are judged."""
    verdict: Verdict
    groups_to_decide: int | None
    """Groups of prompts with which a ratio like this would be decided, with 80% power; None where it is decided or
    there is nothing to decide."""
    detectable: float | None
    """The smallest speed-up that the groups at hand would decide, with 80% power: 0.03 for 3%."""
    unadjusted: Estimate
    """The same ratio with the 95% interval that it has by itself, whatever else is compared."""

    @property
    def decision(self) -> Decision:
        """The verdict on it."""
        return Decision(self.adjusted_p, self.verdict, self.groups_to_decide, self.detectable)


@dataclass(frozen=True)
class Pair:
    """Two variants at one batch size, neither of them the baseline: tokens/s of one over that of the other."""

    batch: int
    arm: str
    length: int | None
    other_arm: str
    other_length: int | None
    ratio: Estimate
    """As that of `Speed`."""
    adjusted_p: float | None
    verdict: Verdict
    groups_to_decide: int | None
    detectable: float | None
    unadjusted: Estimate

    @property
    def decision(self) -> Decision:
        """The verdict on it."""
        return Decision(self.adjusted_p, self.verdict, self.groups_to_decide, self.detectable)


@dataclass(frozen=True)
class Compared:
    """All ratios of a report."""

    baseline: VariantKey
    ratios: Sequence[Speed]
    pairs: Sequence[Pair]


def compare_speed(records: Sequence[RequestRecord], resampler: Resampler, baseline: VariantKey = PLAIN) -> Compared:
    """All metrics of every variant at each batch size, compared with the baseline; tokens per second of every variant
    compared with each other one; and, not judged, tokens per second of each category.

    One family is judged, all of it together: half of its 5% goes to tokens/s, the rest in equal parts to the other
    metrics and the pairs.
    """
    found = by_variant(records)
    wanted = questions(list(found), baseline)
    logs = {question: question.logs(found) for question in wanted}
    verdicts = judge_questions(logs, resampler)
    ratios = [_speed(q, found, verdicts.get(q, _NOTHING)) for q in wanted if not q.is_pair]
    return Compared(
        baseline,
        [*ratios, *_by_category(records, found, baseline, resampler)],
        [_pair(question, verdicts[question]) for question in wanted if question.is_pair and question in verdicts],
    )


def questions(keys: Sequence[Key], baseline: VariantKey) -> list[Question]:
    """All that is asked of these variants: every metric against the baseline (the control: against plain), then pairs
    in tokens/s."""
    asked = [Question(metric, key, _against(key, baseline)) for metric in METRICS for key in keys]
    return [*(question for question in asked if question.key != question.against), *_pairs(keys, baseline)]


def judge_questions(logs: Mapping[Question, Mapping[int, float]], resampler: Resampler) -> dict[Question, Judged]:
    """The verdict on each ratio, given its logarithm by group: all but the control's are one family. Those of which
    nothing was measured are left out."""
    judged = {q: q.group for q in logs if logs[q] and q.key[1] != CONTROL and repeated(q, logs) is None}
    finest = resampler.finest(smallest_alpha(judged, PRIMARY))
    asks: dict[Question, Ask] = {q: ask_mean(finest, tuple(own.values())) for q, own in logs.items() if own}
    verdicts = judge_together({q: asks[q] for q in judged}, judged, PRIMARY, resampler.smallest_effect)
    for question in logs:
        twin = repeated(question, logs)
        if twin is not None:
            verdicts[question] = verdicts[twin]
        elif question in asks and question not in verdicts:
            verdicts[question] = not_judged(asks[question])
    return verdicts


def variant_named(name: str, labels: Mapping[VariantKey, str]) -> VariantKey:
    """The variant of this label, or of this arm where it has one length. Raises `ConfigError` with the nearest."""
    found = [key for key, label in labels.items() if name in (label, key[0])]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(labels[key] for key in found)
        raise ConfigError(f"baseline {name!r} has several draft lengths: name one of {names}")
    raise ConfigError(f"baseline {name!r} is no arm of the experiment; {nearest(name, list(labels.values()))}")


_NAN = Estimate(math.nan, None, None, 0)
_NOTHING = Judged(_NAN, _NAN, Decision(None, "undecided", None, None))


@dataclass(frozen=True)
class Question:
    """One ratio: of which metric, of whom, and to whom."""

    metric: str
    key: Key
    against: Key
    is_pair: bool = False
    category: str | None = None

    @property
    def group(self) -> str:
        """Which ratios of the family it is like."""
        return PAIRS if self.is_pair else self.metric

    def logs(self, found: Mapping[Key, Sequence[RequestRecord]]) -> dict[int, float]:
        """By group of prompts, the logarithm of the ratio."""
        base, own = (values_by_turn(found.get(key, ()), self.metric, self.category) for key in (self.against, self.key))
        return log_ratios(base, own, is_rate=self.metric in (PRIMARY, PER_REQUEST))


def _against(key: Key, baseline: VariantKey) -> Key:
    return (key[0], *(PLAIN if key[1] == CONTROL else baseline))


def _pairs(keys: Sequence[Key], baseline: VariantKey) -> Iterator[Question]:
    others = [key for key in keys if key[1] != CONTROL and key[1:] != baseline]
    for index, other in enumerate(others):
        for key in others[index + 1 :]:
            if key[0] == other[0]:
                yield Question(PRIMARY, key, other, is_pair=True)


def repeated(question: Question, logs: Mapping[Question, Mapping[int, float]]) -> Question | None:
    """One by one, requests that bring as many tokens have the same ratio end to end as in tokens/s: one question."""
    if question.metric != "e2e" or question.key[0] != 1:
        return None
    twin = Question(PRIMARY, question.key, question.against)
    own, other = logs[question], logs[twin]
    is_same = own.keys() == other.keys() and all(math.isclose(own[g], other[g], abs_tol=1e-9) for g in own)
    return twin if is_same and own else None


def _by_category(
    records: Sequence[RequestRecord],
    found: Mapping[Key, Sequence[RequestRecord]],
    baseline: VariantKey,
    resampler: Resampler,
) -> Iterator[Speed]:
    categories = dict.fromkeys(record.category for record in records)
    for category in categories if len(categories) > 1 else ():
        for key in found:
            question = Question(PER_REQUEST, key, _against(key, baseline), category=category)
            logs = question.logs(found) if question.key != question.against else {}
            if logs:
                yield _speed(question, found, not_judged(ask_mean(resampler, tuple(logs.values()))))


def _speed(question: Question, found: Mapping[Key, Sequence[RequestRecord]], judged: Judged) -> Speed:
    batch, arm, length = question.key
    values = [
        list(values_by_turn(found.get(key, ()), question.metric, question.category).values())
        for key in (question.against, question.key)
    ]
    base, own = (geometric_mean(own) if own and judged is not _NOTHING else math.nan for own in values)
    decision = vars(judged.decision)
    return Speed(
        question.metric,
        arm,
        length,
        batch,
        question.category,
        base,
        own,
        judged.ratio,
        unadjusted=judged.unadjusted,
        **decision,
    )


def _pair(question: Question, judged: Judged) -> Pair:
    decision = vars(judged.decision)
    return Pair(*question.key, *question.against[1:], judged.ratio, unadjusted=judged.unadjusted, **decision)


Turn = TypeVar("Turn", bound=tuple[int, ...])


def log_ratios(base: Mapping[Turn, float], own: Mapping[Turn, float], *, is_rate: bool) -> dict[int, float]:
    """By what is independent (the first number of a turn), the mean of log(own / base) over its turns, turned for times
    so that more is better. Turns that lack on either side are left out."""
    by_group: dict[int, list[float]] = {}
    for turn in base:
        if turn in own:
            ratio = math.log(own[turn] / base[turn])
            by_group.setdefault(turn[0], []).append(ratio if is_rate else -ratio)
    return {group: sum(logs) / len(logs) for group, logs in by_group.items()}


def values_by_turn(
    records: Sequence[RequestRecord], metric: str, category: str | None
) -> dict[tuple[int, int, int], float]:
    """One metric's value by (cluster, group, repetition); groups that have none are left out. A cluster is a group, or
    those that hold turns of the same conversations."""
    clusters = clusters_of_groups(records)
    turns: dict[tuple[int, int, int], list[RequestRecord]] = {}
    for record in records:
        if category is None or record.category == category:
            turns.setdefault((clusters[record.group], record.group, record.repetition), []).append(record)
    values = {turn: _VALUES[metric](own) for turn, own in turns.items()}
    return {turn: value for turn, value in values.items() if value is not None and value > 0}


def _rate(records: Sequence[RequestRecord]) -> float | None:
    return sum(len(r.token_ids) for r in records) / max(r.e2e for r in records)


_VALUES: Mapping[str, Callable[[Sequence[RequestRecord]], float | None]] = {
    PRIMARY: _rate,
    PER_REQUEST: lambda records: sum(len(r.token_ids) for r in records) / sum(r.e2e for r in records),
    "e2e": lambda records: sum(r.e2e for r in records) / len(records),
    "itl": lambda records: mean_known(r.itl for r in records),
    "ttft": lambda records: sum(r.ttft for r in records) / len(records),
}


def mean_known(values: Iterable[float | None]) -> float | None:
    """The mean of those that are known; None where none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def geometric_mean(values: Sequence[float]) -> float:
    """Of at least one positive value."""
    return math.exp(sum(map(math.log, values)) / len(values))
