"""What one trial of a feature is called, from answers that were made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dovetail.spec_decode.experiments.arms import Variant
from dovetail.spec_decode.experiments.features import request_features
from dovetail.spec_decode.experiments.trials import Answer, Asked, Position, judge

DRAFTS = Variant("a", 3)
SURE = (Position(-0.1, (-0.1, -2.5)), Position(-0.7, (-0.7, -0.70001)))
EXPECTED = Asked("ran", (Answer((5, 6), SURE, ("length", None)),), drafted=4)


def outcome(answer: Answer, *, idle: str | None = None, drafted: int = 4, is_promised: bool = True) -> str:
    asked = Asked("ran", (answer,), drafted=drafted)
    return judge(DRAFTS, "x", asked, EXPECTED, is_promised=is_promised, idle=idle, tolerance=0.01).outcome


OWN = EXPECTED.answers[0]


def test_the_baselines_answer_is_the_baselines() -> None:
    assert outcome(OWN) == "ran, as the baseline"


@pytest.mark.parametrize(
    "logprobs",
    [None, SURE[:1], (SURE[0], None), (SURE[0], Position(-0.8, (-0.7, -0.8))), (SURE[0], Position(-0.7, (-0.1, -0.7)))],
    ids=["dropped", "too few", "one lacks", "own token's", "another's"],
)
def test_log_probabilities_that_lack_or_differ_are_told(logprobs: tuple[Position | None, ...] | None) -> None:
    assert outcome(replace(OWN, logprobs=logprobs)) == "ran, other log probabilities"


def test_of_equally_likely_tokens_either_may_stand_among_the_best() -> None:
    tied = Position(-0.70001, (-0.7, -0.70001, -0.70001))
    assert outcome(replace(OWN, logprobs=(SURE[0], tied))) == "ran, as the baseline"


def test_what_shows_nothing_in_the_baseline_shows_nothing_in_an_arm() -> None:
    assert outcome(OWN, idle="") == "ran, no effect here"
    assert outcome(OWN, idle="", drafted=0) == "ran, nothing drafted"


def test_other_tokens_and_other_ends_are_told_first() -> None:
    assert outcome(replace(OWN, tokens=(5, 7)), idle="") == "ran, other tokens"
    assert outcome(replace(OWN, ending=("stop", 6))) == "ran, other tokens"
    assert outcome(replace(OWN, tokens=(5, 7)), is_promised=False) == "ran"


def test_values_are_such_that_they_must_show() -> None:
    """Of what the baseline says unasked, something is forbidden, or ends it."""
    greedy, text = [7, 8, 9, 7, 8, 9, 7, 8], "the cat and the dog and"
    found = {feature.name: feature.changes for feature in request_features([7, 8, 9] * 4, greedy, text)}
    assert found["bad_words"]["bad_words"][0] in text
    assert text.index(found["stop strings"]["stop"][0]) < len(text) - 3
    assert greedy.index(found["stop_token_ids"]["stop_token_ids"][0]) < len(greedy) - 1
    assert greedy[0] not in found["allowed_token_ids"]["allowed_token_ids"]
    assert found["logit_bias"]["logit_bias"][greedy[0]] < -10
