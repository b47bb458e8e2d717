"""Which request features work in which arm: each is tried, and its output compared with the baseline's.

A feature that is ignored is the worst answer, so "ran" alone says little: a request with the feature must bring the
tokens (and log probabilities) that the baseline brings with it, and the baseline must bring others without it, or
nothing was shown. That holds for greedy requests, and for seeded ones as long as drafts are not drawn
(docs/speculation.md, "Seeds"). The prompt repeats itself, so that lookups find something to guess, and drafters that
read predictions are told the baseline's greedy answer; where nothing was drafted all the same, the answer says so,
since then nothing was tried.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail.spec_decode.experiments.arms import Setup, Variant
from dovetail.spec_decode.experiments.divergences import TIE_GAPS
from dovetail.spec_decode.experiments.run import Bench, TokenIds, Workload
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL
from dovetail.spec_decode.experiments.trials import MAX_TOKENS, Asked, Trial, ask, judge, shown

_PROMPT = 192
"""Tokens of the prompt, at most."""
_REPEATED = 24
_SEEDED: Mapping[str, Any] = {"temperature": 1.5, "seed": 1}
_STOP_LENGTH = 3
"""Characters of the stop string."""


@dataclass(frozen=True)
class Feature:
    """What a request asks, and what the same request asks without the feature."""

    name: str
    changes: Mapping[str, Any]
    """Of a greedy request."""
    without: Mapping[str, Any] | None = field(default_factory=dict)
    """Likewise; None: nothing is left without it."""


def try_features(setup: Setup, bench: Bench, workload: Workload) -> list[Trial]:
    """Each feature in each arm, at its first draft length."""
    prompt = repeating_prompt(workload.token_ids[0], bench.engines[0].config.model.max_model_len - MAX_TOKENS - 1)
    baseline = _Baseline(bench, prompt)
    greedy = baseline.ask({})
    if greedy.outcome != "ran":
        why = f"the baseline itself {greedy.outcome} a greedy request: {greedy.reason}"
        return [Trial(variant.arm, "all", "not tried", why) for variant in first_variants(bench)]
    tokens = greedy.answers[0].tokens
    tokenizer = bench.engine_of(baseline.variant).tokenizer
    tolerance = baseline.tolerance()
    trials = []
    for feature in request_features(prompt, tokens, tokenizer.decode(tokens) if tokenizer is not None else None):
        expected = baseline.ask(feature.changes)
        has_effect = feature.without is None or shown(expected) != shown(baseline.ask(feature.without))
        for variant in first_variants(bench):
            is_baseline = variant.arm == BASELINE
            is_greedy = feature.changes.get("temperature", 0.0) == 0
            trials.append(
                judge(
                    variant,
                    feature.name,
                    expected if is_baseline else ask(bench, variant, [prompt], feature.changes, predictions=[tokens]),
                    expected,
                    is_promised=is_greedy or not setup.arms[variant.arm].draws_seeded,
                    idle=None if has_effect else "",
                    tolerance=tolerance,
                )
            )
    return trials


def first_variants(bench: Bench) -> list[Variant]:
    """One variant of each arm, the baseline first."""
    first: dict[str, Variant] = {}
    for variant in bench.variants:
        if variant.arm != CONTROL:
            first.setdefault(variant.arm, variant)
    return list(first.values())


def repeating_prompt(token_ids: Sequence[int], most: int, longest: int = _PROMPT) -> TokenIds:
    """The end of a prompt again and again, `most` tokens at most."""
    part = list(token_ids[-_REPEATED:])
    count = max(1, min(most, longest))
    return (part * -(-count // len(part)))[-count:]


def request_features(prompt: Sequence[int], greedy: Sequence[int], text: str | None) -> Iterator[Feature]:
    """Features with values that should show on this prompt, by what the baseline answers to it without any.

    Args:
        greedy: its greedy output tokens.
        text: their text; None without a tokenizer.
    """
    # What ends the output late, so that drafts come before, and not with its last token.
    most = greedy[: -(-3 * len(greedy) // 4)]
    last_new = max(most, key=most.index)
    others = sorted(set(prompt) - {greedy[0]}) or sorted(set(prompt))
    ends_at_once = {"stop_token_ids": [greedy[0]]}
    yield Feature("greedy", {}, None)
    yield Feature("logprobs", {"logprobs": 2})
    yield Feature("prompt_logprobs", {"prompt_logprobs": 1})
    yield Feature("logit_bias", {"logit_bias": {greedy[0]: -100.0}})
    yield Feature("repetition_penalty", {"repetition_penalty": 1.2})
    yield Feature("presence_penalty", {"presence_penalty": 2.0})
    yield Feature("frequency_penalty", {"frequency_penalty": 2.0})
    yield Feature("min_tokens", ends_at_once | {"min_tokens": MAX_TOKENS // 2}, ends_at_once)
    yield Feature("allowed_token_ids", {"allowed_token_ids": others})
    yield Feature("stop_token_ids", {"stop_token_ids": [last_new]})
    yield Feature("temperature, seeded", _SEEDED)
    yield Feature("n = 2, seeded", {**_SEEDED, "n": 2}, _SEEDED)
    yield Feature("min_p", {**_SEEDED, "min_p": 0.3}, _SEEDED)
    yield Feature("top_k", {**_SEEDED, "top_k": 5}, _SEEDED)
    yield Feature("top_p", {**_SEEDED, "top_p": 0.5}, _SEEDED)
    if text is not None:
        yield Feature("stop strings", {"stop": [_late_part(text)], "detokenize": True})
        words = re.findall(r"[^\W\d_]{2,}", text)
        yield Feature("bad_words", {"bad_words": [words[len(words) // 2] if words else "the"]})


def _late_part(text: str) -> str:
    """A piece of the text that first occurs as late as any, and not at its end."""
    most = text[: -(-3 * len(text) // 4)]
    pieces = [most[start : start + _STOP_LENGTH] for start in range(max(1, len(most) - _STOP_LENGTH + 1))]
    whole = [piece for piece in pieces if piece and "\ufffd" not in piece]
    return max(whole, key=most.index, default=".")


class _Baseline:
    """What the baseline answers, each question asked once."""

    def __init__(self, bench: Bench, prompt: TokenIds):
        self.variant = Variant(BASELINE, None)
        self._bench = bench
        self._prompt = prompt
        self._known: dict[str, Asked] = {}

    def ask(self, changes: Mapping[str, Any]) -> Asked:
        """A request for the prompt."""
        key = json.dumps(changes, sort_keys=True)
        if key not in self._known:
            self._known[key] = ask(self._bench, self.variant, [self._prompt], changes)
        return self._known[key]

    def tolerance(self) -> float:
        """Twice the largest difference between log probabilities of its own tokens, decoded one by one and computed in
        one pass; at least what ties are by the dtype."""
        dtype = self._bench.engine_of(self.variant).config.model.dtype
        largest = TIE_GAPS.get(dtype, max(TIE_GAPS.values()))
        decoded = self.ask({"logprobs": 2})
        if decoded.outcome != "ran":
            return largest
        whole = [*self._prompt, *decoded.answers[0].tokens]
        scored = ask(self._bench, self.variant, [whole], {"prompt_logprobs": 0, "max_tokens": 1})
        if scored.outcome != "ran":
            return largest
        one_by_one, together = decoded.answers[0].logprobs or (), scored.answers[-1].logprobs or ()
        pairs = zip(one_by_one, together[len(self._prompt) :], strict=True)
        return max([largest, *(2 * abs(a.own - b.own) for a, b in pairs if a is not None and b is not None)])
