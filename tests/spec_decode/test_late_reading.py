"""A draft model reads a prompt when the first draft is wanted. The target as its own draft model must have every draft
accepted from then on: whatever is missing in its pages, or stale, costs acceptance."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail import LLM, RequestOutput, SamplingParams
from dovetail.worker.speculation.late_reading import read_soonest

from .conftest import TinyPair, greedy

NUM_TOKENS = 20
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

PLUGINS = '''
import json
from pathlib import Path

import numpy as np

from dovetail.contracts.draft_length import AdaptiveDraftLength
from dovetail.contracts.plugin import PluginOptions
from dovetail.spec_decode.draft_model import DraftModelDrafter, DraftModelOptions


class WhenOptions(PluginOptions):
    known: list[int] = [0]
    """Drafts are wanted from the first of these numbers of known tokens on, up to the second, from the third on ..."""


class When(AdaptiveDraftLength):
    contract = (1, 0)
    Options = WhenOptions

    def observe(self, report):
        pass

    def ask(self, question):
        passed = [sum(len(question.known_tokens(i)) >= n for n in self.options.known) for i in question.seq_ids]
        return [most if count % 2 else 0 for most, count in zip(question.most.tolist(), passed)]

    def keep(self, offered):
        return [len(draft.token_ids) for draft in offered.drafts]

    def idle_drafters(self, num_requests):
        return ()

    def forget(self, seq_ids):
        pass


class LoggedOptions(DraftModelOptions):
    log: Path


class Logged(DraftModelDrafter):
    """Writes down how many tokens it computes after how many known ones, and what it drafts."""

    Options = LoggedOptions

    @classmethod
    def model_section(cls, options):
        return {key: value for key, value in super().model_section(options).items() if key != "log"}

    def propose(self, batch):
        self.rows = 0
        drafts = super().propose(batch)
        with self.options.log.open("a") as file:
            known = [request.token_ids.tolist() for request in batch.requests]
            read = sum(len(request.hidden_rows) for request in batch.requests)
            given = [None if draft is None else list(draft.token_ids) for draft in drafts]
            print(json.dumps({"known": known, "rows": self.rows, "read": read, "drafts": given}), file=file)
        return drafts

    def _forward(self, seq_ids, starts, counts, tokens):
        self.rows += len(tokens)
        return super()._forward(seq_ids, starts, counts, tokens)
'''


class Pair(TinyPair):
    """With the tokens that transformers generates for some prompts."""

    def __init__(self, directory: Path):
        super().__init__(directory, PLUGINS)
        draw = random.Random(4)
        self.prompts = [[draw.randrange(3, 128) for _ in range(length)] for length in (3, 9, 30, 30, 9, 22)]
        self.answers = [greedy(self.target_model, prompt, NUM_TOKENS) for prompt in self.prompts]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("late"))


class Run:
    """An engine whose one drafter writes down what it does, and gets drafts to do as `known` says."""

    def __init__(self, pair: Pair, log: Path, path: Path, known: list[int], sections: dict[str, Any]):
        self._log = log
        drafter = {
            "name": f"{pair.plugins}:Logged",
            "path": str(path),
            "dtype": "float32",
            "num_tokens": 4,
            "length": {"name": f"{pair.plugins}:When", "known": known},
            "log": str(log),
        }
        self.llm = LLM(
            model={"path": str(pair.target), "tokenizer_mode": "none", "dtype": "float32"} | sections.pop("model", {}),
            cache={"block_size": 4, "num_blocks": 400} | sections.pop("cache", {}),
            executor={"threads": 1},
            speculative={"drafters": {"it": drafter}},
            **sections,
        )

    def generate(self, prompts: list[list[int]], params: SamplingParams = PARAMS) -> list[RequestOutput]:
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        assert all(output.metrics.drafter_error is None for output in outputs)
        return outputs

    def calls(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()] if self._log.exists() else []


@pytest.fixture
def start(pair: Pair, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    created: list[Run] = []

    def make(known: list[int], path: Path | None = None, **sections: Any) -> Run:
        created.append(Run(pair, tmp_path / f"log{len(created)}", path or pair.target, known, sections))
        return created[-1]

    yield make
    for run in created:
        assert run.llm.engine.cache_statistics().num_used_blocks == 0
        run.llm.shutdown()


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def assert_all_accepted(outputs: list[RequestOutput]) -> None:
    for output in outputs:
        assert output.metrics.num_drafted > 0
        assert output.metrics.num_accepted == output.metrics.num_drafted


def test_where_no_draft_is_wanted_the_draft_model_computes_nothing(pair: Pair, start: Callable[..., Run]) -> None:
    run = start([1000], scheduler={"max_num_batched_tokens": 16, "max_num_seqs": 4})
    assert tokens_of(run.generate(pair.prompts)) == pair.answers
    assert run.calls() == []


def test_no_first_token_waits_for_the_draft_model(pair: Pair, start: Callable[..., Run]) -> None:
    run = start([0])
    run.generate(pair.prompts[:1])
    outputs = run.generate(pair.prompts)
    assert tokens_of(outputs) == pair.answers
    assert_all_accepted(outputs)
    prompts = {tuple(prompt) for prompt in pair.prompts}
    known = [tuple(tokens) for call in run.calls() for tokens in call["known"]]
    assert all(tokens[:-1] not in prompts for tokens in known)


@pytest.mark.parametrize("known", [[0], [12], [35], [12, 24, 34]], ids=str)
@pytest.mark.parametrize(
    "scheduler", [{"max_num_seqs": 6}, {"max_num_batched_tokens": 8, "max_num_seqs": 4}], ids=["whole", "parts"]
)
def test_drafts_are_right_whenever_they_are_wanted(
    pair: Pair, start: Callable[..., Run], known: list[int], scheduler: dict[str, int]
) -> None:
    run = start(known, scheduler=scheduler)
    outputs = run.generate(pair.prompts)
    assert tokens_of(outputs) == pair.answers
    assert all(output.metrics.num_accepted == output.metrics.num_drafted for output in outputs)
    assert_all_accepted(outputs[2:4])


def test_drafts_are_what_transformers_says_of_the_draft_model(pair: Pair, start: Callable[..., Run]) -> None:
    run = start([0, 14, 20], pair.draft, scheduler={"max_num_batched_tokens": 12, "max_num_seqs": 6})
    assert tokens_of(run.generate(pair.prompts)) == pair.answers
    rounds = [(k, d) for call in run.calls() for k, d in zip(call["known"], call["drafts"], strict=True) if d]
    assert len(rounds) > 20
    for known, drafted in rounds:
        assert drafted == greedy(pair.draft_model, known, len(drafted))


def test_no_step_reads_more_than_a_step_may_compute(pair: Pair, start: Callable[..., Run]) -> None:
    run = start([33], scheduler={"max_num_batched_tokens": 8, "max_num_seqs": 4})
    assert_all_accepted(run.generate(pair.prompts[2:4]))
    read = [call["read"] for call in run.calls()]
    assert max(read) == 8
    assert sum(count == 8 for count in read) >= 4, "two prompts of 30 tokens"


def test_a_cached_prefix_is_read_once(pair: Pair, start: Callable[..., Run]) -> None:
    run = start([130])
    prompt = (pair.prompts[2] * 4)[:100]
    run.generate([prompt])  # leaves its blocks unread
    assert run.calls() == []
    longer = [*prompt, *pair.prompts[3]]
    first = run.generate([longer])
    num_calls = len(run.calls())
    again = run.generate([longer])
    for outputs in (first, again):
        assert outputs[0].num_cached_tokens >= 96
        assert_all_accepted(outputs)
    calls = run.calls()
    assert max(call["rows"] for call in calls[:num_calls]) >= 130
    assert max(call["rows"] for call in calls[num_calls:]) < 16


@pytest.mark.parametrize("swap_gib", [0, 0.01], ids=["recompute", "swap"])
def test_preempted_requests_come_back(pair: Pair, start: Callable[..., Run], swap_gib: float) -> None:
    run = start(
        [0, 34, 38],
        cache={"num_blocks": 24, "swap_gib": swap_gib},
        model={"max_model_len": 60},
        scheduler={"max_num_seqs": 6},
    )
    outputs = run.generate(pair.prompts * 2)
    assert tokens_of(outputs) == pair.answers * 2
    assert_all_accepted(outputs)
    if swap_gib:
        assert run.llm.engine.cache_statistics().num_swapped_in_blocks > 0


def test_siblings_share_what_was_read(pair: Pair, start: Callable[..., Run]) -> None:
    run = start([36])
    [output] = run.generate([pair.prompts[2]], replace(PARAMS, temperature=0.9, n=4))
    assert len(output.outputs) == 4
    assert_all_accepted([output])


def test_what_an_aborted_request_left_does_no_harm(pair: Pair, start: Callable[..., Run]) -> None:
    run = start([34], cache={"num_blocks": 40})
    for index in range(3):
        run.llm.engine.add_request(str(index), pair.prompts[3], PARAMS)
        for _ in range(2 + 2 * index):
            run.llm.engine.step()
        run.llm.engine.abort_request([str(index)])
    outputs = run.generate([pair.prompts[2], pair.prompts[3]])
    assert tokens_of(outputs) == pair.answers[2:4]
    assert_all_accepted(outputs)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 60))
def test_what_is_read_is_a_beginning_and_no_more_than_allowed(counts: list[int], most: int) -> None:
    unread = [range(10, 10 + count) for count in counts]
    read = read_soonest(unread, most)
    assert all(now.start == span.start and len(now) <= len(span) for now, span in zip(read, unread, strict=True))
    assert sum(map(len, read)) == min(most, sum(counts))
    assert sum(0 < len(now) < len(span) for now, span in zip(read, unread, strict=True)) <= 1
