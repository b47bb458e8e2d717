"""Which request features work in which arm: each is tried, and its output compared with the baseline's.

A feature that is ignored is the worst answer, so "ran" alone says little: a request with the feature must bring the
tokens that the baseline brings with it. That holds for greedy requests, and for seeded ones as long as drafts are not
drawn (docs/speculation.md, "Seeds"). The prompt repeats itself, so that lookups find something to guess; where nothing
was drafted all the same, the answer says so, since then nothing was tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dovetail.contracts.errors import DovetailError, RequestError
from dovetail.spec_decode.experiments.arms import Setup, Variant
from dovetail.spec_decode.experiments.run import Bench, Workload
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL

Outcome = Literal["ran, as the baseline", "ran, other tokens", "ran, nothing drafted", "ran", "refused", "failed"]

_TOKENS = 24
_PROMPT = 192
"""Tokens of the prompt, at most."""
_REPEATED = 24


@dataclass(frozen=True)
class Trial:
    """One feature in one arm."""

    arm: str
    feature: str
    outcome: Outcome
    reason: str = ""


def try_features(setup: Setup, bench: Bench, workload: Workload) -> list[Trial]:
    """Each feature in each arm, at its first draft length."""
    prompt = repeating_prompt(workload.token_ids[0], bench.engines[0].config.model.max_model_len - _TOKENS - 1)
    baseline = Variant(BASELINE, None)
    first: dict[str, Variant] = {}
    for variant in bench.variants:
        if variant.arm != CONTROL:
            first.setdefault(variant.arm, variant)
    trials = []
    for feature, changes in _features(bench, prompt).items():
        expected = _try(bench, baseline, prompt, changes)
        for variant in first.values():
            tried = expected if variant.arm == BASELINE else _try(bench, variant, prompt, changes)
            is_promised = changes.get("temperature", 0.0) == 0 or not setup.arms[variant.arm].draws_seeded
            trials.append(_compare(variant, feature, tried, expected, is_promised=is_promised))
    return trials


def repeating_prompt(token_ids: Sequence[int], room: int) -> list[int]:
    """The end of a prompt again and again, `room` tokens at most."""
    part = list(token_ids[-_REPEATED:])
    longest = max(1, min(room, _PROMPT))
    return (part * -(-longest // len(part)))[-longest:]


def _features(bench: Bench, prompt: list[int]) -> Mapping[str, Mapping[str, Any]]:
    first, last = prompt[0], prompt[-1]
    found: dict[str, Mapping[str, Any]] = {
        "greedy": {},
        "logprobs": {"logprobs": 2},
        "prompt_logprobs": {"prompt_logprobs": 1},
        "logit_bias": {"logit_bias": {first: 2.0, last: -2.0}},
        "repetition_penalty": {"repetition_penalty": 1.2},
        "presence_penalty": {"presence_penalty": 0.5},
        "frequency_penalty": {"frequency_penalty": 0.5},
        "min_tokens": {"min_tokens": _TOKENS // 2, "ignore_eos": False},
        "allowed_token_ids": {"allowed_token_ids": sorted(set(prompt))},
        "stop_token_ids": {"stop_token_ids": [last]},
        "n = 2": {"n": 2},
        "temperature 0.7, seeded": {"temperature": 0.7, "seed": 1},
        "min_p": {"temperature": 0.7, "seed": 1, "min_p": 0.1},
        "top_k and top_p": {"temperature": 0.7, "seed": 1, "top_k": 20, "top_p": 0.9},
    }
    if bench.engine_of(Variant(BASELINE, None)).tokenizer is not None:
        found["stop strings"] = {"stop": ["."], "detokenize": True}
        found["bad_words"] = {"bad_words": ["the"]}
    return found


@dataclass(frozen=True)
class _Tried:
    outcome: Literal["ran", "refused", "failed"]
    tokens: tuple[tuple[int, ...], ...] = ()
    drafted: int = 0
    reason: str = ""


def _try(bench: Bench, variant: Variant, prompt: list[int], changes: Mapping[str, Any]) -> _Tried:
    plain = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    given = plain | {"max_tokens": _TOKENS, "ignore_eos": True, "output_kind": "final_only"} | dict(changes)
    try:
        finished = bench.run(variant, [prompt], [bench.params(variant, **given)])[0]
    except RequestError as error:
        return _Tried("refused", reason=str(error))
    except DovetailError as error:
        return _Tried("failed", reason=str(error))
    assert finished.last is not None
    drafter_error = finished.last.metrics.drafter_error
    if drafter_error is not None:
        return _Tried("failed", reason=drafter_error)
    tokens = tuple(tuple(completion.token_ids) for completion in finished.last.outputs)
    return _Tried("ran", tokens, finished.last.metrics.num_drafted)


def _compare(variant: Variant, feature: str, tried: _Tried, expected: _Tried, *, is_promised: bool) -> Trial:
    outcome: Outcome = tried.outcome
    if tried.outcome == "ran":
        is_comparable = is_promised and expected.outcome == "ran"
        if is_comparable and tried.tokens != expected.tokens:
            outcome = "ran, other tokens"
        elif variant.length is not None and tried.drafted == 0:
            outcome = "ran, nothing drafted"
        elif is_comparable:
            outcome = "ran, as the baseline"
    return Trial(variant.arm, feature, outcome, tried.reason)
