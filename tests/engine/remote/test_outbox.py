"""Updates that a slow client did not take are merged, and nothing of them is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from dovetail.contracts.outputs import RequestMetrics
from dovetail.contracts.step import TokenLogprobs
from dovetail.engine.remote.messages import Update, decode_to_client, encode
from dovetail.engine.remote.outbox import Outbox, merged
from dovetail.engine.step_update import SequenceEnd, StepUpdate

SPANS = st.tuples(st.integers(0, 99), st.integers(1, 4))
ENTRY = TokenLogprobs(1, -0.5, 1, [1], [-0.5])


@st.composite
def updates(draw: st.DrawFn) -> StepUpdate:
    """Of some of five sequences."""
    seq_ids = draw(st.lists(st.integers(0, 4), unique=True))
    counts = draw(st.none() | st.lists(st.integers(0, 3), min_size=len(seq_ids), max_size=len(seq_ids)))
    num_tokens = len(seq_ids) if counts is None else sum(counts)
    return StepUpdate(
        seq_ids=seq_ids,
        token_ids=draw(st.lists(st.integers(0, 9), min_size=num_tokens, max_size=num_tokens)),
        counts=counts,
        ends=[SequenceEnd(seq_id, "stop", None, None, 3, None) for seq_id in draw(st.lists(st.integers(5, 9)))],
        logprobs={seq_id: [ENTRY] for seq_id in seq_ids if draw(st.booleans())},
        accepted_spans=draw(st.dictionaries(st.integers(0, 4), st.lists(SPANS, min_size=1, max_size=1))),
        metrics={name: RequestMetrics(draw(st.floats(0, 9))) for name in draw(st.sets(st.sampled_from("ab")))},
    )


def tokens_of(update: StepUpdate, found: dict[int, list[int]]) -> None:
    """Adds the update's tokens to those of each sequence."""
    tokens = iter(update.token_ids)
    for index, seq_id in enumerate(update.seq_ids):
        count = 1 if update.counts is None else update.counts[index]
        found.setdefault(seq_id, []).extend(next(tokens) for _ in range(count))


@given(st.lists(updates(), min_size=2, max_size=5))
def test_merged_updates_say_what_they_say_one_by_one(given_updates: list[StepUpdate]) -> None:
    expected: dict[int, list[int]] = {}
    for update in given_updates:
        tokens_of(update, expected)
    num_logprobs = sum(len(entries) for update in given_updates for entries in update.logprobs.values())
    metrics = {name: found for update in given_updates for name, found in update.metrics.items()}
    ends = [end for update in given_updates for end in update.ends]
    whole = given_updates[0]
    for update in given_updates[1:]:
        whole = merged(whole, update)
    found: dict[int, list[int]] = {}
    tokens_of(whole, found)
    assert {seq_id: tokens for seq_id, tokens in found.items() if tokens} == {
        seq_id: tokens for seq_id, tokens in expected.items() if tokens
    }
    assert sum(map(len, whole.logprobs.values())) == num_logprobs
    for seq_id in range(5):
        spans = [span for update in given_updates for span in update.accepted_spans.get(seq_id, [])]
        assert whole.accepted_spans.get(seq_id, []) == spans
    assert (whole.ends, whole.metrics) == (ends, metrics)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), min_size=1, max_size=5))
def test_prompt_logprobs_that_come_again_are_taken_once(parts: list[tuple[int, int]]) -> None:
    """Position p has entry p: parts that overlap, as after a preemption, without holes."""
    position, updates_ = 0, []
    for back, count in parts:
        start = max(0, position - back)
        entries = [TokenLogprobs(index, 0.0, 1, [], []) for index in range(start, start + count)]
        updates_.append(StepUpdate(prompt_logprobs={"r": (start, entries)}))
        position = max(position, start + count)
    whole = updates_[0]
    for update in updates_[1:]:
        whole = merged(whole, update)
    start, entries = whole.prompt_logprobs["r"]
    assert start == 0
    assert [entry.token_id for entry in entries] == list(range(position))


@given(updates())
def test_an_update_travels_unchanged(update: StepUpdate) -> None:
    message = decode_to_client(encode(Update(update)))
    assert isinstance(message, Update)
    assert message.update == update


def test_a_client_that_does_not_read_costs_one_update_and_gets_all(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as reader:
        reader.set(zmq.RCVHWM, 4)
        outbox = Outbox(context, f"ipc://{tmp_path}/updates")
        for token in range(1000):
            outbox.send(Update(StepUpdate(seq_ids=[7], token_ids=[token])))
        assert outbox.is_behind
        reader.bind(f"ipc://{tmp_path}/updates")
        found: dict[int, list[int]] = {}
        num_messages = 0
        while len(found.get(7, [])) < 1000:
            outbox.flush()
            if reader.poll(10):
                message = decode_to_client(reader.recv())
                assert isinstance(message, Update)
                tokens_of(message.update, found)
                num_messages += 1
        assert found == {7: list(range(1000))}
        assert num_messages < 100
        assert not outbox.is_behind
        outbox.close()


def test_messages_that_are_none_are_refused() -> None:
    import msgspec

    with pytest.raises(msgspec.DecodeError):
        decode_to_client(b"\x93\x01\x02\x03")
