"""Requests of a drafter that has not paid for long."""

from __future__ import annotations

import pytest

from dovetail.contracts.sampling import SamplingParams
from dovetail.engine.idle_drafters import IdleDrafters

GREEDY = SamplingParams(temperature=0)
IDLE = frozenset({"eagle"})


def test_one_request_in_sixteen_looks_whether_it_pays_again() -> None:
    choice = IdleDrafters(strict=False)
    got = [choice.drafter_for("eagle", GREEDY, IDLE) for _ in range(64)]
    assert got.count("eagle") == 4
    assert got.count(None) == 60


@pytest.mark.parametrize(("asked", "idle"), [("ngram", IDLE), (None, IDLE), ("eagle", frozenset())])
def test_others_get_what_they_ask_for(asked: str | None, idle: frozenset[str]) -> None:
    choice = IdleDrafters(strict=False)
    assert [choice.drafter_for(asked, GREEDY, idle) for _ in range(20)] == [asked] * 20


@pytest.mark.parametrize(
    ("sampling", "strict"),
    [(SamplingParams(temperature=1.0, seed=3), False), (SamplingParams(temperature=1.0), True)],
)
def test_where_drafts_decide_what_is_drawn_the_clock_does_not_take_them_away(
    sampling: SamplingParams, strict: bool
) -> None:
    choice = IdleDrafters(strict=strict)
    assert [choice.drafter_for("eagle", sampling, IDLE) for _ in range(20)] == ["eagle"] * 20
