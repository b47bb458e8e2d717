"""Which tokens of an output a drafter guessed and the target accepted, by what each step brought."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail import LLM, LLMEngine, RequestOutput, SamplingParams
from dovetail.contracts.outputs import CompletionOutput, RequestMetrics
from dovetail.engine.output_stream import merged

LOOKUP = {"drafters": {"lookup": {"name": "ngram", "num_tokens": 4, "min_match": 1, "length": "fixed"}}}
PROMPT = [5, 6, 7, 8] * 4


def outputs_of(engine: LLMEngine, params: SamplingParams) -> list[RequestOutput]:
    engine.add_request("it", PROMPT, params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def positions(spans: Sequence[tuple[int, int]]) -> list[int]:
    """The positions that spans cover; they neither overlap nor touch."""
    for (start, count), (following, _) in pairwise(spans):
        assert start + count < following
    return [position for start, count in spans for position in range(start, start + count)]


@pytest.fixture
def guessing(make_llm: Callable[..., LLM]) -> LLM:
    """The tiny model with a drafter that looks up what was said before, of which some is accepted."""
    return make_llm(speculative=LOOKUP)


def test_all_tokens_of_a_step_but_its_last_are_accepted_drafts(guessing: LLM) -> None:
    """A step that brings n tokens accepted n - 1: what comes in one delta of an engine that is stepped by hand."""
    params = SamplingParams(temperature=0, max_tokens=80, output_kind="delta")
    outputs = outputs_of(guessing.engine, params)
    num_accepted = 0
    for output in outputs[:-1]:
        (completion,) = output.outputs
        assert positions(completion.accepted_spans) == list(range(len(completion.token_ids) - 1))
        num_accepted += len(completion.token_ids) - 1
    assert num_accepted > 10
    last = len(positions(outputs[-1].outputs[0].accepted_spans))
    cut = outputs[-1].metrics.num_accepted - num_accepted - last
    assert 0 <= cut <= 4


@pytest.mark.parametrize("kind", ["cumulative", "final_only"])
def test_every_kind_of_output_says_the_same(kind: Any, guessing: LLM) -> None:
    deltas = outputs_of(guessing.engine, SamplingParams(temperature=0, max_tokens=61, output_kind="delta"))
    expected, shift = [], 0
    for output in deltas:
        expected += [shift + position for position in positions(output.outputs[0].accepted_spans)]
        shift += len(output.outputs[0].token_ids)
    assert len(expected) > 5
    outputs = outputs_of(guessing.engine, SamplingParams(temperature=0, max_tokens=61, output_kind=kind))
    assert positions(outputs[-1].outputs[0].accepted_spans) == expected
    for output in outputs:
        completion = output.outputs[0]
        num_tokens = len(completion.token_ids)
        assert positions(completion.accepted_spans) == [each for each in expected if each < num_tokens]


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_tokens_behind_the_end_are_in_no_span(max_tokens: int, guessing: LLM) -> None:
    for output in outputs_of(guessing.engine, SamplingParams(temperature=0, max_tokens=max_tokens)):
        completion = output.outputs[0]
        assert all(position < len(completion.token_ids) for position in positions(completion.accepted_spans))


def test_a_request_without_a_drafter_has_no_spans(guessing: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, speculation="off")
    assert [list(each.outputs[0].accepted_spans) for each in outputs_of(guessing.engine, params)] == [[]] * 20


STORY = "Once upon a time, there was a little girl named Lily. Once upon a time"


@pytest.mark.parametrize("stop", ["little", "Lily", "play", "cat", "named L"])
def test_a_stop_string_cuts_spans_too(stop: str, story_model: Any) -> None:
    """Stop strings end in the middle of what a step brings."""
    sections = {"path": str(story_model), "dtype": "float32", "max_model_len": 256}
    with LLM(model=sections, speculative=LOOKUP, executor={"threads": 1}) as llm:
        free, stopped = (
            llm.generate(STORY, SamplingParams(temperature=0, max_tokens=60, stop=stops))[0].outputs[0]
            for stops in ([], [stop])
        )
    num_tokens = len(stopped.token_ids)
    assert stopped.stop_reason == stop
    assert num_tokens < len(free.token_ids)
    found = positions(stopped.accepted_spans)
    assert found == [position for position in positions(free.accepted_spans) if position < num_tokens]


@st.composite
def deltas(draw: st.DrawFn) -> list[list[bool]]:
    """Of one completion: for each token of each delta whether it is an accepted draft. Deltas end as steps do, with a
    token that the target drew."""
    rounds = st.lists(st.integers(0, 4), min_size=1, max_size=3)
    return [[each for n in draw(rounds) for each in [*[True] * n, False]] for _ in range(draw(st.integers(1, 6)))]


def output_of(flags: list[bool], first: int) -> RequestOutput:
    spans, start = [], None
    for position, flag in enumerate([*flags, False]):
        if flag and start is None:
            start = position
        elif not flag and start is not None:
            spans.append((start, position - start))
            start = None
    completion = CompletionOutput(0, "", list(range(first, first + len(flags))), accepted_spans=spans)
    return RequestOutput("it", None, [], [completion], False, RequestMetrics(0.0), is_delta=True)


@given(deltas())
def test_deltas_that_were_not_read_are_merged_with_their_spans(given_deltas: list[list[bool]]) -> None:
    flags = [flag for delta in given_deltas for flag in delta]
    whole, first = output_of(given_deltas[0], 0), len(given_deltas[0])
    for delta in given_deltas[1:]:
        whole = merged(whole, output_of(delta, first))
        first += len(delta)
    (completion,) = whole.outputs
    assert completion.token_ids == list(range(len(flags)))
    assert positions(completion.accepted_spans) == [position for position, flag in enumerate(flags) if flag]
