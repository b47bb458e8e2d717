"""Measures first divergences of outputs by the target's log probabilities, from the baseline's engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail import RequestOutput, SamplingParams
from dovetail.contracts.errors import DovetailError
from dovetail.spec_decode.experiments.arms import Variant
from dovetail.spec_decode.experiments.records import RequestRecord, by_prompt
from dovetail.spec_decode.experiments.run import Bench, Workload
from dovetail.spec_decode.experiments.schema import BASELINE

TIE_GAPS: Mapping[str, float] = {"float64": 1e-6, "float32": 1e-3, "float16": 2e-2, "bfloat16": 1.5e-1}
"""The least tie gap by dtype of the activations: some dozens of their rounding steps at the size of usual logits."""
_NOISE_RECORDS = 16
"""Number of baseline outputs whose log probabilities are computed in two ways, to measure rounding."""
_MAX_ALTERNATIVES = 20


@dataclass(frozen=True)
class Divergence:
    """The first difference of one prompt's tokens from the baseline's."""

    prompt: int
    category: str
    index: int
    """Index of the first output token that differs (or that one output lacks)."""
    expected: int | None
    got: int | None
    """Token ids; None where that output had ended."""
    gap: float | None
    """Log probability of the target's best token there minus that of the less likely of the two; None where that is
    not among the alternatives that can be asked for."""
    top2_gap: float
    """Log probability difference of the target's best two tokens there."""
    is_tie: bool


class GapMeter:
    """Asks the baseline's engine for log probabilities."""

    def __init__(self, bench: Bench, workload: Workload, baseline: Sequence[RequestRecord]):
        self._bench = bench
        self._baseline = baseline
        self._variant = Variant(BASELINE, None)
        self._prompts = {p.index: ids for p, ids in zip(workload.prompts, workload.token_ids, strict=True)}
        config = bench.engine_of(self._variant).config
        self.known_tie_gap = bench.experiment.tie_gap
        """None until it is needed, where the experiment does not give it."""
        self._least_tie_gap = TIE_GAPS.get(config.model.dtype, max(TIE_GAPS.values()))
        limit = config.model.max_logprobs
        most = min(_MAX_ALTERNATIVES, config.model.vocab_size)
        self._alternatives = most if limit < 0 else min(most, limit)

    def measure(self, base: RequestRecord, other: Sequence[int], index: int) -> Divergence:
        """Measures the gap where an output differs from other tokens for the same prompt."""
        expected = base.token_ids[index] if index < len(base.token_ids) else None
        got = other[index] if index < len(other) else None
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
