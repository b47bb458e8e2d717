"""Requests of a drafter that has not paid for long."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from dovetail import LLM
from dovetail.contracts.sampling import SamplingParams
from dovetail.engine.idle_drafters import IdleDrafters
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

IDLE = frozenset({"eagle"})


def kept(choice: IdleDrafters, num_requests: int, idle: frozenset[str] = IDLE) -> list[int]:
    """Which of so many requests had the drafter."""
    return [index for index in range(num_requests) if choice.drafter_for("eagle", idle) == "eagle"]


def test_ever_fewer_requests_look_whether_it_pays_again() -> None:
    found = kept(IdleDrafters(), 2000)
    assert found[0] == 15
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert gaps[:4] == [32, 64, 128, 256]
    assert set(gaps[4:]) == {256}


def test_a_drafter_that_paid_meanwhile_is_looked_at_sooner_again() -> None:
    choice = IdleDrafters()
    kept(choice, 1000)
    kept(choice, 1, frozenset())
    assert kept(choice, 20) == [15]


@pytest.mark.parametrize(("asked", "idle"), [("ngram", IDLE), (None, IDLE), ("eagle", frozenset())])
def test_others_get_what_they_ask_for(asked: str | None, idle: frozenset[str]) -> None:
    choice = IdleDrafters()
    assert [choice.drafter_for(asked, idle) for _ in range(20)] == [asked] * 20


POLICY = '''
from dovetail.contracts.draft_length import AdaptiveDraftLength


class IdleFromTheThirdRequestOn(AdaptiveDraftLength):
    """Whatever was measured."""

    contract = (1, 0)

    def __init__(self, options, setup):
        super().__init__(options, setup)
        self.num_requests = 0

    def observe(self, report):
        pass

    def ask(self, question):
        return question.most

    def keep(self, offered):
        return [len(draft.token_ids) for draft in offered.drafts]

    def idle_drafters(self, num_requests):
        return ("draft",) if self.num_requests >= 2 else ()

    def forget(self, seq_ids):
        self.num_requests += len(seq_ids)
'''


def test_requests_without_their_idle_drafter_share_a_prefix_and_give_the_same_tokens(tmp_path: Path) -> None:
    (tmp_path / "policy.py").write_text(POLICY)
    length = f"{tmp_path}/policy.py:IdleFromTheThirdRequestOn"
    save_tiny_model(tmp_path, tiny_config("llama"))
    answers = []
    with LLM(
        model={"path": str(tmp_path), "tokenizer_mode": "none", "max_model_len": 64},
        cache={"num_blocks": 64, "block_size": 4},
        executor={"threads": 1},
        speculative={"drafters": {"draft": {"name": "draft_model", "path": str(tmp_path), "length": length}}},
    ) as llm:
        llm.engine.keep_ended(20)
        for _ in range(20):
            answers += llm.generate([list(range(1, 18))], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        told = [llm.engine.explain_request(answer.request_id).requests[0].stats for answer in answers]
    assert [index for index, stats in enumerate(told) if not stats.drafter_is_idle] == [0, 1, 2, 18]
    # The step that told it is that of the third request, which came before.
    assert [index for index, answer in enumerate(answers) if answer.metrics.num_drafted] == [0, 1, 2, 18]
    assert len({tuple(answer.outputs[0].token_ids) for answer in answers}) == 1
    cached = [answer.metrics.num_cached_tokens for answer in answers]
    assert cached[0] == 0
    assert cached[3] == 0, "blocks of requests with the drafter hold its pages besides, and are others"
    assert all(count == 16 for index, count in enumerate(cached) if index not in (0, 3))
