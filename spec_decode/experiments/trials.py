"""One feature in one arm: what it was asked, what came, and how that compares with the baseline's answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any, Literal

from dovetail import RequestOutput
from dovetail.contracts.errors import DovetailError, RequestError
from dovetail.spec_decode.experiments.arms import Variant
from dovetail.spec_decode.experiments.equality import first_difference
from dovetail.spec_decode.experiments.run import Bench, TokenIds

Outcome = Literal[
    "ran, as the baseline",
    "ran, no effect here",
    "ran, other tokens",
    "ran, other log probabilities",
    "ran, nothing drafted",
    "ran",
    "refused",
    "failed",
    "not tried",
    "not served",
]

MAX_TOKENS = 24
"""Output tokens of a trial."""
_PLAIN: Mapping[str, Any] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "max_tokens": MAX_TOKENS,
    "ignore_eos": True,
    "output_kind": "final_only",
}


@dataclass(frozen=True)
class Trial:
    """One feature in one arm."""

    arm: str
    feature: str
    outcome: Outcome
    reason: str = ""


@dataclass(frozen=True)
class Position:
    """Log probabilities at one position."""

    own: float
    """Of the token at that position."""
    best: tuple[float, ...]
    """All that came, best first: of tokens that are equally likely, any may be among them."""


@dataclass(frozen=True)
class Answer:
    """One completion, or (without tokens) one prompt."""

    tokens: tuple[int, ...]
    logprobs: tuple[Position | None, ...] | None = None
    ending: tuple[str | None, int | str | None] = (None, None)
    """Its finish reason, and the stop token or string."""


@dataclass(frozen=True)
class Asked:
    """What some requests brought in one arm."""

    outcome: Literal["ran", "refused", "failed"]
    answers: tuple[Answer, ...] = ()
    """Of each request its completions, and its prompt where that has log probabilities."""
    drafted: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    reason: str = ""


def ask(
    bench: Bench,
    variant: Variant,
    prompts: Sequence[TokenIds],
    changes: Mapping[str, Any],
    *,
    predictions: Sequence[Sequence[int]] = (),
    keeps_cache: bool = False,
) -> Asked:
    """Sends greedy requests with `changes`, all at once. `predictions`: of the answers to the first prompts, for
    drafters that read them."""
    params = dict(_PLAIN) | dict(changes)
    try:
        told = islice(chain(predictions, repeat(None)), len(prompts))
        sampling = [bench.params(variant, prediction=prediction, **params) for prediction in told]
        finished = bench.run(variant, prompts, sampling, keeps_cache=keeps_cache)
    except RequestError as error:
        return Asked("refused", reason=str(error))
    except DovetailError as error:
        return Asked("failed", reason=str(error))
    outputs = [one.last for one in finished if one.last is not None]
    metrics = [output.metrics for output in outputs]
    drafter_error = next((one.drafter_error for one in metrics if one.drafter_error is not None), None)
    if drafter_error is not None:
        return Asked("failed", reason=drafter_error)
    return Asked(
        "ran",
        tuple(answer for output in outputs for answer in _answers(output)),
        sum(one.num_drafted for one in metrics),
        sum(one.num_cached_tokens for one in metrics),
        sum(one.num_preemptions for one in metrics),
    )


def _answers(output: RequestOutput) -> list[Answer]:
    found = [
        Answer(tuple(one.token_ids), _positions(one.token_ids, one.logprobs), (one.finish_reason, one.stop_reason))
        for one in output.outputs
    ]
    if output.prompt_logprobs is not None:
        found.append(Answer((), _positions(output.prompt_token_ids, output.prompt_logprobs)))
    return found


def _positions(tokens: Sequence[int], logprobs: Sequence[Any] | None) -> tuple[Position | None, ...] | None:
    if logprobs is None:
        return None
    return tuple(
        None
        if entry is None
        else Position(entry[token].logprob, tuple(sorted((one.logprob for one in entry.values()), reverse=True)))
        for token, entry in zip(tokens, logprobs, strict=True)
    )


def judge(
    variant: Variant,
    feature: str,
    asked: Asked,
    expected: Asked,
    *,
    is_promised: bool,
    idle: str | None,
    tolerance: float,
) -> Trial:
    """The verdict.

    Args:
        expected: what the baseline brought.
        is_promised: whether the arm owes the baseline's tokens.
        idle: why the feature was seen to do nothing, or "" for no particular reason; None: it did something.
        tolerance: how far log probabilities may lie apart.
    """
    outcome: Outcome = asked.outcome
    reason = asked.reason
    if asked.outcome == "ran":
        is_comparable = is_promised and expected.outcome == "ran"
        parted = _parted(asked.answers, expected.answers) if is_comparable else None
        if parted is not None:
            outcome, reason = "ran, other tokens", parted
        elif is_comparable and not _same_logprobs(asked.answers, expected.answers, tolerance):
            outcome, reason = "ran, other log probabilities", f"beyond {tolerance:.2g}, or not there"
        elif variant.length is not None and asked.drafted == 0:
            outcome = "ran, nothing drafted"
        elif idle is not None:
            outcome, reason = "ran, no effect here", idle
        elif is_comparable:
            outcome = "ran, as the baseline"
    return Trial(variant.arm, feature, outcome, reason)


def _parted(found: Sequence[Answer], expected: Sequence[Answer]) -> str | None:
    own, other = ([answer for answer in answers if answer.tokens] for answers in (found, expected))
    if len(own) != len(other):
        return f"{len(own)} completions, not {len(other)}"
    for answer, wanted in zip(own, other, strict=True):
        index = first_difference(answer.tokens, wanted.tokens)
        if index is not None:
            return f"from token {index + 1} of {len(wanted.tokens)} on"
        if answer.ending != wanted.ending:
            return f"ended by {answer.ending}, not {wanted.ending}"
    return None


def _same_logprobs(found: Sequence[Answer], expected: Sequence[Answer], tolerance: float) -> bool:
    if len(found) != len(expected):
        return False
    for answer, wanted in zip(found, expected, strict=True):
        if answer.logprobs is None or wanted.logprobs is None:
            if answer.logprobs is not wanted.logprobs:
                return False
        elif len(answer.logprobs) != len(wanted.logprobs) or not all(
            _same_position(a, b, tolerance) for a, b in zip(answer.logprobs, wanted.logprobs, strict=True)
        ):
            return False
    return True


def _same_position(found: Position | None, expected: Position | None, tolerance: float) -> bool:
    if found is None or expected is None:
        return found is expected
    # The token at that position is one of the best, or one more: where two are equally likely, either may hold.
    if abs(len(found.best) - len(expected.best)) > 1 or abs(found.own - expected.own) > tolerance:
        return False
    return all(abs(a - b) <= tolerance for a, b in zip(found.best, expected.best, strict=False))


def shown(asked: Asked) -> object:
    """What a feature can change: tokens, how they end, and whether there are log probabilities."""
    return [(answer.tokens, answer.ending, answer.logprobs is not None) for answer in asked.answers]
