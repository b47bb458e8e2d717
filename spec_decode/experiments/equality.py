"""Compares tokens with the baseline's, per prompt, with the first divergence, the gap between the tokens there, and a
control.

Greedy runs are compared token by token. Where they part, the baseline's engine is asked for its log probabilities after
the common prefix, and the divergence is a **tie** where the two tokens are closer than `tie_gap` there and none is
ahead of both by more: rows of a verify step and of a decode step may go through other kernels, and rounding decides
ties. Else it is **REAL**. How much rounding decides is measured: kernels that round activations to 8 bits turn the last
bit of a sum into a tenth of a logit. The control says how often that happens without any drafts: the baseline a second
time, and once more at a batch size whose decode steps have as many rows as the variant's verify steps, which go through
the same kernels. At the variant's own batch size it would repeat itself, and every rounded tie count against the
drafts.

Sampled runs differ token by token by design: `sampled_equality` watches their rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dovetail.spec_decode.experiments.arms import Setup, Variant
from dovetail.spec_decode.experiments.divergences import Divergence, GapMeter
from dovetail.spec_decode.experiments.judging import (
    WIDE_TIE_GAP,
    Diverged,
    PValues,
    Verdict,
    correct,
    judge,
    p_values,
)
from dovetail.spec_decode.experiments.measuring import Measured
from dovetail.spec_decode.experiments.plan import make_groups
from dovetail.spec_decode.experiments.records import RequestRecord, by_prompt, by_variant
from dovetail.spec_decode.experiments.run import Bench, Workload, request_seeds
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL

DECLARED_LOSSY: tuple[Verdict, str] = ("lossy by declaration", "its rule claims nothing else")


@dataclass(frozen=True)
class DraftedTokens:
    """Of sampled runs: tokens that drafts overrate, for which a wrong rule has a bias (`martingale`)."""

    places: int
    """Tokens for whose place something was drafted."""
    came: float
    """How many of them the draft overrates."""
    expected: float
    """How many these should be, by the target."""
    excess: float | None
    """`came` / `expected`; None where none is expected."""
    p: float
    """At most so likely is such evidence for a rule that keeps the distribution, after Holm over variants and batch
    sizes."""
    detectable: float
    """The excess, less 1, that so many tokens show nineteen times out of twenty."""


@dataclass(frozen=True)
class Equality:
    """Equality of one variant at one batch size."""

    arm: str
    length: int | None
    batch: int
    prompts: int
    """Number of compared prompts; 0 where sampled tokens cannot be compared one by one."""
    divergences: Sequence[Divergence]
    unstable: int
    """Prompts of which repetitions of this variant differ among themselves."""
    p_above_control: float | None
    """Exact one-sided McNemar: of prompts with a REAL divergence in either variant or control but not in both, so many
    in the variant. After Holm, over all variants and batch sizes. None where there is none."""
    verdict: Verdict
    reason: str
    tie_gap: float | None = None
    """Gap below which two tokens are a tie; None where there was no divergence."""
    p_all_above_control: float | None = None
    """The same test over all divergences, ties as well."""
    control_diverged: int | None = None
    """Number of prompts on which the control diverges, ties included; None where no divergence had to be compared with
    it."""
    control_batch: int | None = None
    """Batch size at which the baseline ran for the control."""
    drafted_tokens: DraftedTokens | None = None
    """Of sampled runs whose rule was watched."""

    @classmethod
    def without_prompts(cls, variant: Variant, batch: int, verdict: Verdict, reason: str) -> Equality:
        """Of a sampled run, where tokens are not compared."""
        return cls(variant.arm, variant.length, batch, 0, (), 0, None, verdict, reason)

    @property
    def lossless(self) -> bool | None:
        """Whether the variant is lossless; None where neither was shown."""
        if self.verdict in ("too few prompts", "not shown"):
            return None
        return self.verdict in ("identical", "lossless", "consistent")

    @property
    def num_real(self) -> int:
        """Number of divergences that are no ties."""
        return sum(not divergence.is_tie for divergence in self.divergences)


def compare_equality(setup: Setup, bench: Bench, workload: Workload, measured: Measured) -> list[Equality]:
    """Every variant of a greedy run compared with the baseline, at each batch size; and the baseline with itself at the
    first, which shows what other batches do to its tokens without any drafts."""
    found = by_variant(measured.requests)
    gaps = GapMeter(bench, workload, found[bench.experiment.grid.batch_sizes[0], BASELINE, None])
    lossy = {name for name, arm in setup.arms.items() if not arm.is_lossless}
    raws = list(_greedy(bench, workload, found, gaps, lossy))
    tests = {
        index: PValues(1.0, 1.0) if raw.control is None else p_values(raw.diverged, raw.control.diverged)
        for index, raw in enumerate(raws)
        if raw.variant.arm not in (BASELINE, CONTROL, *lossy)
    }
    corrected = correct(tests)
    return [_judge_greedy(raw, lossy, corrected.get(i), gaps.known_tie_gap) for i, raw in enumerate(raws)]


@dataclass(frozen=True)
class _Control:
    """The baseline's own divergences, with which a variant's are compared."""

    diverged: Diverged
    batch: int


@dataclass(frozen=True)
class _Raw:
    variant: Variant
    batch: int
    prompts: int = 0
    divergences: Sequence[Divergence] = ()
    unstable: int = 0
    control: _Control | None = None
    """None for the control itself, and where no prompt diverged."""

    @property
    def diverged(self) -> Diverged:
        """Number of prompts with a divergence."""
        return _prompts_of(self.divergences)


def _prompts_of(divergences: Sequence[Divergence]) -> Diverged:
    real = frozenset(one.prompt for one in divergences if not one.is_tie)
    return Diverged(real, frozenset(one.prompt for one in divergences))


Found = Mapping[tuple[int, str, int | None], Sequence[RequestRecord]]


def judged_variants(bench: Bench, found: Found, batch: int) -> list[Variant]:
    """Variants that ran at a batch size, but the baseline and its control."""
    ran = [v for v in bench.variants if (batch, v.arm, v.length) in found]
    return [variant for variant in ran if variant.arm not in (BASELINE, CONTROL)]


def _greedy(bench: Bench, workload: Workload, found: Found, gaps: GapMeter, lossy: set[str]) -> Iterator[_Raw]:
    floors = _Floors(bench, workload, gaps)
    batches = [batch for batch in bench.experiment.grid.batch_sizes if (batch, BASELINE, None) in found]
    for batch in batches:
        base = found[batch, BASELINE, None]
        again = _compare_greedy(Variant(CONTROL, None), batch, base, found[batch, CONTROL, None], gaps)
        yield again
        if batch != batches[0]:
            other = _compare_greedy(Variant(BASELINE, None), batch, found[batches[0], BASELINE, None], base, gaps)
            # Its ties are what rounding does, by definition; REAL ones would be a bug.
            own = _Control(Diverged(again.diverged.real, other.diverged.every), batches[0])
            yield replace(other, control=own if other.divergences else None)
        for variant in judged_variants(bench, found, batch):
            raw = _compare_greedy(variant, batch, base, found[batch, variant.arm, variant.length], gaps)
            needs_control = raw.divergences and variant.arm not in lossy
            yield replace(raw, control=floors.control(variant, batch, base, again)) if needs_control else raw


def _compare_greedy(
    variant: Variant, batch: int, base: Sequence[RequestRecord], own: Sequence[RequestRecord], gaps: GapMeter
) -> _Raw:
    expected, got = by_prompt(base), by_prompt(own)
    divergences = []
    for prompt, records in got.items():
        # A prompt diverges if any repetition does, and is shown by the first of them.
        index, record = min(
            ((first_difference(expected[prompt][0].token_ids, r.token_ids), r) for r in records),
            key=lambda pair: float("inf") if pair[0] is None else pair[0],
        )
        if index is not None:
            divergences.append(gaps.measure(expected[prompt][0], record.token_ids, index))
    return _Raw(variant, batch, len(got), divergences, _unstable(got))


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first difference of two sequences, or the end of the shorter one; None for equal ones."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def _unstable(records: Mapping[int, Sequence[RequestRecord]]) -> int:
    return sum(len({tuple(record.token_ids) for record in own}) > 1 for own in records.values())


def _judge_greedy(raw: _Raw, lossy: set[str], corrected: PValues | None, tie_gap: float | None) -> Equality:
    control = raw.control
    own = raw.diverged
    p = None if control is None else corrected or p_values(own, control.diverged)
    verdict: Verdict
    if raw.variant.arm in lossy:
        verdict, reason = DECLARED_LOSSY
    elif not own.every:
        verdict, reason = "identical", "no token differs"
    elif control is None or p is None:
        verdict, reason = "lossless", "what the baseline does to itself"
    else:
        verdict, reason = judge(own, control.diverged, WIDE_TIE_GAP if tie_gap is None else tie_gap, p)
    return replace(
        _equality(raw, verdict, reason),
        tie_gap=tie_gap,
        p_above_control=p.real if p is not None and own.real else None,
        p_all_above_control=p.every if p is not None else None,
        control_diverged=len(control.diverged.every) if control is not None else None,
        control_batch=control.batch if control is not None else None,
    )


def _equality(raw: _Raw, verdict: Verdict, reason: str) -> Equality:
    return Equality(
        raw.variant.arm,
        raw.variant.length,
        raw.batch,
        raw.prompts,
        raw.divergences,
        raw.unstable,
        None,
        verdict,
        reason,
    )


def control_batch(batch: int, length: int | None, largest: int) -> int:
    """Batch size at which a decode step of the baseline has as many rows as a step of the variant that drafts `length`
    tokens for `batch` requests, as far as prompts and batch slots suffice; where that is no other, a smaller one."""
    wanted = min(batch * (1 + (length or 1)), largest)
    return wanted if wanted > batch else max(1, batch // 2)


class _Floors:
    """Runs the baseline at other batch sizes, to see which prompts' tokens rounding moves."""

    def __init__(self, bench: Bench, workload: Workload, gaps: GapMeter):
        self._bench = bench
        self._workload = workload
        self._gaps = gaps
        self._variant = Variant(BASELINE, None)
        most = bench.engine_of(self._variant).config.limits.max_num_seqs
        self._largest = min(len(workload.prompts), most)
        self._known: dict[tuple[int, int], Diverged] = {}

    def control(self, variant: Variant, batch: int, base: Sequence[RequestRecord], again: _Raw) -> _Control:
        """What the baseline does to its tokens of a batch size: `again`, at the same one, and at another."""
        other = control_batch(batch, variant.length, self._largest)
        if (batch, other) not in self._known:
            self._known[batch, other] = self._measure(other, base)
        found = self._known[batch, other]
        return _Control(Diverged(found.real | again.diverged.real, found.every | again.diverged.every), other)

    def _measure(self, batch: int, base: Sequence[RequestRecord]) -> Diverged:
        expected = {prompt: records[0] for prompt, records in by_prompt(base).items()}
        experiment, workload = self._bench.experiment, self._workload
        divergences: dict[int, Divergence] = {}
        # A run that was stopped has not asked all prompts.
        asked = [place for place, prompt in enumerate(workload.prompts) if prompt.index in expected]
        for group in make_groups(len(asked), min(batch, len(asked)), experiment.seed):
            places = [asked[number] for number in group]
            seeds = request_seeds(experiment.sampling, places, 0)
            params = [self._bench.params(self._variant, seed=seed) for seed in seeds]
            finished = self._bench.run(self._variant, [workload.token_ids[place] for place in places], params)
            for place, one in zip(places, finished, strict=True):
                record = expected[workload.prompts[place].index]
                index = first_difference(record.token_ids, one.token_ids)
                if index is not None:
                    divergences[record.prompt] = self._gaps.measure(record, one.token_ids, index)
        return _prompts_of(list(divergences.values()))
