"""Are the tokens the baseline's? Per prompt, with the first divergence, the gap between the tokens there, and a
control.

Greedy runs are compared token by token. Where they part, the baseline's engine is asked for its log probabilities after
the common prefix, and the divergence is a **tie** where the two tokens are closer than `tie_gap` there and none is
ahead of both by more: rows of a verify step and of a decode step may go through other kernels, and rounding decides
ties. Else it is **REAL**. How much rounding decides is measured: kernels that round activations to 8 bits turn the last
bit of a sum into a tenth of a logit. The control, the baseline a second time, says how often that happens without any
drafts.

Sampled runs differ token by token by design. There the mean log probability per token that the target gives to what was
generated is compared, paired by prompt: if the rule keeps the target's distribution, it has the same expectation in
both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal

from dovetail import RequestOutput, SamplingParams
from dovetail.contracts.errors import DovetailError
from dovetail.spec_decode.experiments.arms import Setup, Variant
from dovetail.spec_decode.experiments.bootstrap import Estimate, Resampler, binomial_tail, holm
from dovetail.spec_decode.experiments.records import RequestRecord, by_prompt, by_variant
from dovetail.spec_decode.experiments.run import Bench, Measured, Workload
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL

Verdict = Literal["identical", "lossless", "LOSSY", "lossy by declaration", "consistent", "too few prompts"]

TIE_GAPS: Mapping[str, float] = {"float64": 1e-6, "float32": 1e-3, "float16": 2e-2, "bfloat16": 1.5e-1}
"""The least tie gap by dtype of the activations: some dozens of their rounding steps at the size of usual logits."""
_NOISE_RECORDS = 16
"""Outputs of the baseline whose log probabilities are computed in two ways, to see what rounding does to them."""
_MAX_ALTERNATIVES = 20
_SIGNIFICANT = 0.05
_MAX_SCORED = 96
"""Sampled outputs that are scored per variant and batch size: each costs a prefill."""


@dataclass(frozen=True)
class Divergence:
    """Where one prompt's tokens first differ from the baseline's."""

    prompt: int
    category: str
    index: int
    """Of the first output token that differs (or that one of them lacks)."""
    expected: int | None
    got: int | None
    """Token ids; None where that side had ended."""
    gap: float | None
    """Log probability of the target's best token there minus that of the less likely of the two; None where that is
    not among the alternatives that can be asked for."""
    top2_gap: float
    """Between the target's best two tokens there."""
    is_tie: bool


@dataclass(frozen=True)
class Equality:
    """One variant at one batch size."""

    arm: str
    length: int | None
    batch: int
    prompts: int
    """Prompts that were compared, or 0 where sampling leaves nothing to compare token by token."""
    divergences: Sequence[Divergence]
    unstable: int
    """Prompts of which repetitions of this variant differ among themselves."""
    p_above_control: float | None
    """Exact one-sided McNemar: of prompts with a REAL divergence in either variant or control but not in both, so many
    in the variant."""
    logprob_difference: Estimate | None
    """Sampled runs: mean log probability per token under the target, variant minus baseline."""
    verdict: Verdict
    reason: str
    tie_gap: float | None = None
    """Below which two tokens are a tie; None where nothing had to be told apart."""

    @property
    def lossless(self) -> bool | None:
        """None where the prompts are too few to tell."""
        if self.verdict == "too few prompts":
            return None
        return self.verdict in ("identical", "lossless", "consistent")

    @property
    def num_real(self) -> int:
        """Divergences that are no ties."""
        return sum(not divergence.is_tie for divergence in self.divergences)


def compare_equality(
    setup: Setup, bench: Bench, workload: Workload, measured: Measured, resampler: Resampler
) -> list[Equality]:
    """Every variant beside the baseline, at each batch size; and the baseline beside itself at the first one, which
    tells what other batches do to its tokens without any drafts."""
    found = by_variant(measured.requests)
    first = bench.experiment.grid.batch_sizes[0]
    gaps = _GapMeter(bench, workload, found[first, BASELINE, None])
    comparison = _compare_greedy if bench.experiment.sampling.temperature == 0 else _compare_sampled
    results: list[Equality] = []
    for batch in bench.experiment.grid.batch_sizes:
        base = found[batch, BASELINE, None]
        control = comparison(Variant(CONTROL, None), batch, base, found[batch, CONTROL, None], gaps, resampler)
        results.append(_judge(control, None, is_lossless=True))
        if batch != first and bench.experiment.sampling.temperature == 0:
            other = comparison(Variant(BASELINE, None), batch, found[first, BASELINE, None], base, gaps, resampler)
            results.append(_judge(other, control, is_lossless=True))
        for variant in bench.variants:
            if variant.arm in (BASELINE, CONTROL) or (batch, variant.arm, variant.length) not in found:
                continue
            own = found[batch, variant.arm, variant.length]
            raw = comparison(variant, batch, base, own, gaps, resampler)
            results.append(_judge(raw, control, is_lossless=setup.arms[variant.arm].is_lossless))
    return [replace(result, tie_gap=gaps.known_tie_gap) for result in _correct(results)]


@dataclass(frozen=True)
class _Raw:
    variant: Variant
    batch: int
    prompts: int
    divergences: Sequence[Divergence]
    unstable: int
    logprob_difference: Estimate | None


def _compare_greedy(
    variant: Variant,
    batch: int,
    base: Sequence[RequestRecord],
    own: Sequence[RequestRecord],
    gaps: _GapMeter,
    _: Resampler,
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
            divergences.append(gaps.measure(expected[prompt][0], record, index))
    return _Raw(variant, batch, len(got), divergences, _unstable(got), None)


def _compare_sampled(
    variant: Variant,
    batch: int,
    base: Sequence[RequestRecord],
    own: Sequence[RequestRecord],
    gaps: _GapMeter,
    resampler: Resampler,
) -> _Raw:
    expected, got = by_prompt(base), by_prompt(own)
    prompts = list(got)[:_MAX_SCORED]
    repetitions = max(1, _MAX_SCORED // len(prompts))
    differences = [
        gaps.mean_logprob(got[prompt][:repetitions]) - gaps.mean_logprob(expected[prompt][:repetitions])
        for prompt in prompts
    ]
    return _Raw(variant, batch, 0, (), 0, resampler.mean(differences))


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first place at which two sequences differ, or at which the shorter ends; None for equal ones."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def _unstable(records: Mapping[int, Sequence[RequestRecord]]) -> int:
    return sum(len({tuple(record.token_ids) for record in own}) > 1 for own in records.values())


def _judge(raw: _Raw, control: _Raw | None, *, is_lossless: bool) -> Equality:
    verdict, reason, p_value = _verdict(raw, control, is_lossless=is_lossless)
    return Equality(
        raw.variant.arm,
        raw.variant.length,
        raw.batch,
        raw.prompts,
        raw.divergences,
        raw.unstable,
        p_value,
        raw.logprob_difference,
        verdict,
        reason,
    )


def _verdict(raw: _Raw, control: _Raw | None, *, is_lossless: bool) -> tuple[Verdict, str, float | None]:
    if not is_lossless:
        return "lossy by declaration", "its rule claims nothing else", None
    if raw.logprob_difference is not None:
        if not raw.logprob_difference.has_interval:
            return "too few prompts", "too few prompts for an interval of the log probability", None
        # Whether it is one too many is known when all variants are.
        return "consistent", "log probability under the target as in the baseline", None
    if not raw.divergences:
        return "identical", "no token differs", None
    return judge_real(_real_prompts(raw), None if control is None else _real_prompts(control))


def judge_real(own: Set[int], noise: Set[int] | None) -> tuple[Verdict, str, float | None]:
    """Verdict, its reason and McNemar's p of a variant whose tokens differ from the baseline's: `own` are its prompts
    with REAL divergences, `noise` those of the control; None: the baseline itself is judged."""
    if not own:
        return "lossless", "at ties of the target only", None
    if noise is None:
        return "lossless", "what the baseline does to itself", None
    differing = len(own ^ noise)
    p_value = binomial_tail(len(own - noise), differing)
    if not noise or p_value < _SIGNIFICANT:
        return "LOSSY", f"{len(own)} divergences that no rounding explains", p_value
    if len(own) <= len(noise):
        return "lossless", "no more than the baseline from itself", p_value
    if binomial_tail(differing, differing) >= _SIGNIFICANT:
        return "too few prompts", f"{len(own)} REAL, control {len(noise)}: too few for any test to tell", p_value
    return "lossless", "by the test no more than the baseline from itself", p_value


def _real_prompts(raw: _Raw) -> set[int]:
    """Ties prove nothing, so they are not counted: not against a variant, and not for it."""
    return {divergence.prompt for divergence in raw.divergences if not divergence.is_tie}


def _correct(results: list[Equality]) -> list[Equality]:
    """Sampled runs: a difference counts after Holm's correction over all variants but the control."""
    p_values = {
        index: result.logprob_difference.p
        for index, result in enumerate(results)
        if result.verdict == "consistent"
        and result.arm != CONTROL
        and result.logprob_difference is not None
        and result.logprob_difference.p is not None
    }
    adjusted = holm(p_values)
    for index, p_value in adjusted.items():
        if p_value < _SIGNIFICANT:
            reason = f"log probability under the target differs from the baseline's (adjusted p = {p_value:.2g})"
            results[index] = replace(results[index], verdict="LOSSY", reason=reason)
    return results


class _GapMeter:
    """Asks the baseline's engine for log probabilities."""

    def __init__(self, bench: Bench, workload: Workload, baseline: Sequence[RequestRecord]):
        self._bench = bench
        self._baseline = baseline
        self._variant = Variant(BASELINE, None)
        self._scores: dict[tuple[int, tuple[int, ...]], float] = {}
        self._prompts = {p.index: ids for p, ids in zip(workload.prompts, workload.token_ids, strict=True)}
        config = bench.engine_of(self._variant).config
        self.known_tie_gap = bench.experiment.tie_gap
        """None until it is needed, where the experiment does not give it."""
        self._least_tie_gap = TIE_GAPS.get(config.model.dtype, max(TIE_GAPS.values()))
        limit = config.model.max_logprobs
        room = min(_MAX_ALTERNATIVES, config.model.vocab_size)
        self._alternatives = room if limit < 0 else min(room, limit)

    def measure(self, base: RequestRecord, other: RequestRecord, index: int) -> Divergence:
        """What the target says where two outputs part."""
        expected = base.token_ids[index] if index < len(base.token_ids) else None
        got = other.token_ids[index] if index < len(other.token_ids) else None
        prefix = [*self._prompts[base.prompt], *base.token_ids[:index]]
        logprobs = self._next_logprobs(prefix)
        ordered = sorted(logprobs.values(), reverse=True)
        shown = [logprobs.get(token) for token in (expected, got) if token is not None]
        worst = None if len(shown) < 2 or None in shown else min(value for value in shown if value is not None)
        gap = None if worst is None else ordered[0] - worst
        top2 = ordered[0] - ordered[1] if len(ordered) > 1 else float("inf")
        if self.known_tie_gap is None:
            self.known_tie_gap = max(self._least_tie_gap, 2 * self._noise())
        is_tie = gap is not None and gap < self.known_tie_gap
        return Divergence(base.prompt, base.category, index, expected, got, gap, top2, is_tie)

    def _noise(self) -> float:
        """The largest difference between log probabilities of the baseline's own tokens, computed one by one as they
        are decoded and all in one pass. No draft has a part in it."""
        largest = 0.0
        for prompt, records in list(by_prompt(self._baseline).items())[:_NOISE_RECORDS]:
            ids = self._prompts[prompt]
            count = max(1, len(records[0].token_ids))
            params = self._params(max_tokens=count, prompt_logprobs=None, logprobs=0)
            decoded = self._run(list(ids), params).outputs[0]
            entries = zip(decoded.token_ids, decoded.logprobs or (), strict=True)
            one_by_one = [entry[token].logprob for token, entry in entries]
            together = self._scores_of([*ids, *decoded.token_ids])[len(ids) - 1 :]
            largest = max([largest, *(abs(a - b) for a, b in zip(one_by_one, together, strict=True))])
        return largest

    def mean_logprob(self, records: Sequence[RequestRecord]) -> float:
        """Mean over a prompt's repetitions of the mean log probability per generated token."""
        return sum(map(self._score, records)) / len(records)

    def _score(self, record: RequestRecord) -> float:
        key = (record.prompt, tuple(record.token_ids))
        if key not in self._scores:
            prompt = self._prompts[record.prompt]
            scored = self._scores_of([*prompt, *record.token_ids])[len(prompt) - 1 :]
            self._scores[key] = sum(scored) / len(scored)
        return self._scores[key]

    def _scores_of(self, token_ids: list[int]) -> list[float]:
        """Log probabilities of all tokens but the first, from one pass."""
        found = self._run(token_ids, self._params(prompt_logprobs=0, logprobs=None)).prompt_logprobs
        assert found is not None
        pairs = zip(token_ids, found, strict=True)
        return [entry[token].logprob for token, entry in pairs if entry is not None]

    def _next_logprobs(self, prefix: list[int]) -> dict[int, float]:
        output = self._run(prefix, self._params(prompt_logprobs=None, logprobs=self._alternatives))
        logprobs = output.outputs[0].logprobs
        assert logprobs
        return {token: entry.logprob for token, entry in logprobs[0].items()}

    def _params(self, *, max_tokens: int = 1, **logprobs: int | None) -> SamplingParams:
        fixed = {"temperature": 0.0, "ignore_eos": True, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        changes: dict[str, Any] = {**fixed, "max_tokens": max_tokens, "output_kind": "final_only", **logprobs}
        return self._bench.params(self._variant, **changes)

    def _run(self, token_ids: list[int], params: SamplingParams) -> RequestOutput:
        last = self._bench.run(self._variant, [token_ids], [params])[0].last
        if last is None:
            raise DovetailError("the engine answered a request for log probabilities with nothing")
        return last
