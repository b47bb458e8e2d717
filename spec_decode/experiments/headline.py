"""The verdicts of a report in a few lines, with which the page begins and the terminal ends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dovetail.spec_decode.experiments.bootstrap import Estimate
from dovetail.spec_decode.experiments.families import Verdict
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL
from dovetail.spec_decode.experiments.speed import PRIMARY, Compared, Speed

METRICS: Mapping[str, str] = {PRIMARY: PRIMARY, "itl": "ITL", "ttft": "TTFT"}
"""Metrics of a headline, as they are written there."""
_NAMED = 3
"""Arms that a line names; of more it gives the number."""
_REFERENCE = "are what others are compared with"
"""In place of a verdict on tokens, of plain."""
_UNSOUND = ("LOSSY", "lossy by declaration", "not shown", "too few prompts")


@dataclass(frozen=True)
class Effect:
    """One metric of one arm."""

    metric: str
    verdict: Verdict
    ratio: Estimate
    """More than 1 is better; the interval leaves 1 out if and only if the verdict is faster or slower."""
    groups_to_decide: int | None

    @property
    def text(self) -> str:
        """The effect in a few words."""
        if self.ratio.groups == 0:
            return f"{METRICS[self.metric]} not measured"
        ends = "no interval" if self.ratio.low is None else f"{self.ratio.low:.2f} to {self.ratio.high:.2f}"
        return f"{METRICS[self.metric]} {self.verdict} {self.ratio.value:.2f}x [{ends}]"


@dataclass(frozen=True)
class ArmHeadline:
    """One variant at one batch size."""

    label: str
    batch: int
    effects: Sequence[Effect]
    """Of `METRICS`, in their order."""
    equality: str
    """The verdict on its tokens."""

    @property
    def primary(self) -> Effect:
        """Of tokens/s."""
        return self.effects[0]

    @property
    def name(self) -> str:
        """With the batch size."""
        return f"{self.label}, batch {self.batch}"

    @property
    def text(self) -> str:
        """All of it in one line."""
        return f"{self.name}: {'; '.join([*(effect.text for effect in self.effects), f'tokens {self.equality}'])}"


@dataclass(frozen=True)
class Headline:
    """Every variant at each batch size, and the verdict on all of them."""

    baseline: str
    arms: Sequence[ArmHeadline]
    left_out: Sequence[str]
    """Arms that did not run."""
    num_warnings: int

    @property
    def best(self) -> ArmHeadline | None:
        """The fastest in tokens/s of those that are faster; of all where none is. Lossy ones come last."""
        return max(self.arms, key=_rank, default=None)

    def lines(self) -> list[str]:
        """At most four: the best arm, tokens, what is undecided and what it would take, what went wrong."""
        found = [self._best_line(), self._token_line(), self._undecided_line(), self._trouble_line()]
        return [line for line in found if line]

    def _best_line(self) -> str:
        best = self.best
        if best is None:
            return ""
        if best.primary.verdict == "faster":
            return f"best: {best.text}"
        return f"no arm is faster than {self.baseline} in tokens/s; nearest: {best.text}"

    def _token_line(self) -> str:
        counts = Counter(arm.equality for arm in self.arms if arm.equality != _REFERENCE)
        if not counts:
            return ""
        unsound = [f"{arm.name} {arm.equality}" for arm in self.arms if arm.equality in _UNSOUND]
        found = f"tokens: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}"
        return f"{found}; not shown to be equal: {_listed(unsound)}" if unsound else found

    def _undecided_line(self) -> str:
        waiting = [arm for arm in self.arms if arm.primary.verdict == "undecided"]
        if not waiting:
            return ""
        needs = []
        for arm in sorted(waiting, key=lambda arm: (arm.primary.groups_to_decide or math.inf) * arm.batch):
            groups = arm.primary.groups_to_decide
            more = "" if groups is None else f" ({groups:,} groups = {groups * arm.batch:,} prompts would decide it)"
            needs.append(f"{arm.name}{more}")
        return f"undecided in tokens/s, {len(waiting)} of {len(self.arms)}: {_listed(needs)}"

    def _trouble_line(self) -> str:
        parts = [f"left out: {_listed(self.left_out)}"] if self.left_out else []
        if self.num_warnings:
            parts.append(f"{self.num_warnings} warning{'s' if self.num_warnings > 1 else ''}")
        return "; ".join(parts)


def make_headline(
    compared: Compared,
    equality: Mapping[tuple[str, int | None, int], str],
    label: Callable[[str, int | None], str],
    left_out: Sequence[str] = (),
    num_warnings: int = 0,
) -> Headline:
    """Of all variants but the baseline and the control; plain too, where the baseline is another.

    Args:
        equality: verdicts on tokens by arm, length and batch size.
    """
    overall = {(s.metric, s.arm, s.length, s.batch): s for s in compared.ratios if s.category is None}
    arms = []
    for metric, arm, length, batch in overall:
        if metric == PRIMARY and arm != CONTROL:
            effects = [_effect(overall[name, arm, length, batch]) for name in METRICS]
            tokens = _REFERENCE if arm == BASELINE else equality[arm, length, batch]
            arms.append(ArmHeadline(label(arm, length), batch, effects, tokens))
    return Headline(label(*compared.baseline), arms, left_out, num_warnings)


def _effect(speed: Speed) -> Effect:
    return Effect(speed.metric, speed.verdict, speed.ratio, speed.groups_to_decide)


def _rank(arm: ArmHeadline) -> tuple[bool, bool, float]:
    value = arm.primary.ratio.value
    return arm.equality != "LOSSY", arm.primary.verdict == "faster", value if value == value else 0.0


def _listed(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{rest}"
