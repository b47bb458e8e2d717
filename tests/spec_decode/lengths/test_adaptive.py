"""The policy against simulated machines and texts, with a clock that only the simulation turns."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from dovetail.contracts.draft_length import (
    DrafterCall,
    DrafterFacts,
    DraftQuestion,
    DraftRound,
    LengthSetup,
    OfferedDrafts,
    OtherDraft,
    StepReport,
)
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.speculation import Draft
from dovetail.spec_decode.lengths.adaptive import AdaptiveLength

FACTS = DrafterFacts(num_tokens=6, stateless=True)


def adaptive(facts: DrafterFacts = FACTS, others: Mapping[str, DrafterFacts] | None = None) -> AdaptiveLength:
    """A fresh policy of one drafter, called "it"."""
    return AdaptiveLength(PluginOptions(), LengthSetup(drafters={"it": facts}, others=others or {}))


def observe(
    policy: AdaptiveLength,
    num_requests: int,
    seconds: float | None,
    rounds: Sequence[tuple[int, int, Sequence[int]]] = (),
    calls: Sequence[DrafterCall] = (),
) -> None:
    """A step that verified drafts of "it" alone: (seq_id, drafted, accepted)."""
    policy.observe(
        StepReport(
            num_requests=num_requests,
            num_drafts=sum(drafted for _, drafted, _ in rounds),
            num_other_drafts=0,
            seconds=seconds,
            rounds=[DraftRound(seq_id=k, drafter="it", drafted=d, accepted=a) for k, d, a in rounds],
            calls=calls,
        )
    )


def call(asked: Mapping[int, int], seconds: float, given: Mapping[int, int] | None = None) -> DrafterCall:
    """A call of "it"; it gave what it was asked for, unless `given` says otherwise."""
    found = asked if given is None else given
    return DrafterCall(
        drafter="it",
        seq_ids=list(asked),
        asked=list(asked.values()),
        given=[found[seq_id] for seq_id in asked],
        seconds=seconds,
    )


def ask(
    policy: AdaptiveLength,
    seq_ids: Sequence[int],
    most: int,
    known: Sequence[np.ndarray],
    n: int,
    behind: Sequence[int] = (),
) -> list[int]:
    """How many drafts are asked for."""
    known_tokens = dict(zip(seq_ids, known, strict=True)).__getitem__
    question = DraftQuestion(
        drafter="it",
        seq_ids=seq_ids,
        most=np.full(len(seq_ids), most),
        known_tokens=known_tokens,
        num_requests=n,
        behind=behind,
    )
    return [int(count) for count in policy.ask(question)]


def keep(policy: AdaptiveLength, drafts: Mapping[int, Draft], num_known: Mapping[int, int], n: int) -> list[int]:
    """How many nodes of each draft are verified."""
    offered = OfferedDrafts(
        seq_ids=list(drafts),
        drafters=["it"] * len(drafts),
        drafts=list(drafts.values()),
        num_known=[num_known[seq_id] for seq_id in drafts],
        num_requests=n,
    )
    return list(policy.keep(offered))


def cheap_rows(num_requests: int, num_rows: int) -> float:
    """As on an accelerator: rows are nearly free, until there are many."""
    return max(0.010, 0.0001 * num_rows) + 0.0001 * (num_rows > num_requests)


def dear_rows(num_requests: int, num_rows: int) -> float:
    """As on a CPU with packed weights: every row is work."""
    return 0.004 + 0.003 * num_rows


@dataclass
class World:
    """Requests that decode for ever, of which each draft is right with a chance that may change."""

    cost: Callable[[int, int], float]
    num_requests: int
    chance: Callable[[float], float]
    draft_cost: float = 0.00003
    offers: float = 1.0
    """Chance that the drafter has anything to offer."""
    noise: float = 0.03
    """Spread of a step's seconds; where there is any, one step in a hundred takes five times as long."""
    seed: int = 0

    def run(self, length: int | None, num_steps: int = 1500, skip: float = 0.5) -> float:
        """Tokens per second after the first part of the steps. `length`: a fixed one; None: the policy's."""
        draw = random.Random(self.seed)
        policy = adaptive()
        seq_ids = list(range(self.num_requests))
        known = np.full(self.num_requests, 100)
        drafts: dict[int, Draft] = {}
        calls: list[DrafterCall] = []
        clock = tokens = 0.0
        half = (0.0, 0.0)
        for step in range(num_steps):
            if step == int(num_steps * skip):
                half = (clock, tokens)
            chance = self.chance(step / num_steps)
            num_rows = self.num_requests + sum(len(draft.token_ids) for draft in drafts.values())
            seconds = self.cost(self.num_requests, num_rows) * draw.gauss(1, self.noise)
            seconds *= 5 if self.noise and draw.random() < 0.01 else 1
            clock += seconds
            rounds = []
            for seq_id in seq_ids:
                come = 1
                if seq_id in drafts:
                    count = len(drafts[seq_id].token_ids)
                    right = next((i for i in range(count) if draw.random() >= chance), count)
                    rounds.append((seq_id, count, range(right)))
                    come += right
                known[seq_id] += come
                tokens += come
            observe(policy, self.num_requests, seconds, rounds, calls)
            # Token 1 is what comes; a guess is 1 where it would be accepted.
            text = np.ones(int(known.max()), dtype=np.int32)
            lengths = [length] * len(seq_ids)
            if length is None:
                lengths = ask(
                    policy, seq_ids, FACTS.num_tokens, [text[: known[seq_id]] for seq_id in seq_ids], len(seq_ids)
                )
            asked = {seq_id: count for seq_id, count in zip(seq_ids, lengths, strict=True) if count}
            clock += self.draft_cost * len(asked)
            offered = {}
            for seq_id, count in asked.items():
                if draw.random() < self.offers:
                    offered[seq_id] = Draft([1 if draw.random() < chance else 2 for _ in range(count)])
            given = {seq_id: count if seq_id in offered else 0 for seq_id, count in asked.items()}
            calls = [call(asked, self.draft_cost * len(asked), given)] if asked else []
            drafts = offered
            if length is None and offered:
                kept = keep(policy, offered, dict(enumerate(known.tolist())), len(seq_ids))
                cut = {
                    seq_id: Draft(list(offered[seq_id].token_ids)[:count])
                    for seq_id, count in zip(offered, kept, strict=True)
                }
                drafts = {seq_id: draft for seq_id, draft in cut.items() if draft.token_ids}
        return (tokens - half[1]) / (clock - half[0])


def rate(world: World, length: int) -> float:
    """Of a fixed length; 0 is plain decoding."""
    if length == 0:
        disturbed = 1.04 if world.noise else 1.0
        return world.num_requests / (world.cost(world.num_requests, world.num_requests) * disturbed)
    return world.run(length)


WORLDS = {
    f"{cost.__name__} {num_requests} {chance}": World(cost, num_requests, lambda _, c=chance: c)  # type: ignore[misc]
    for cost in (cheap_rows, dear_rows)
    for num_requests in (1, 4, 16)
    for chance in (0.05, 0.3, 0.6, 0.95)
}


@pytest.mark.parametrize(
    "world",
    [
        # The dearest to simulate: every day those with the most and the least to win.
        pytest.param(world, id=name, marks=pytest.mark.nightly if name.endswith((" 16 0.3", " 16 0.6")) else ())
        for name, world in WORLDS.items()
    ],
)
def test_never_far_from_the_best_fixed_length(world: World) -> None:
    best = max(rate(world, length) for length in (0, 1, 2, 4, 6))
    assert world.run(None) > 0.93 * best


@pytest.mark.parametrize("offers", [0.1, 1.0])
@pytest.mark.parametrize("num_requests", [1, 4, 16])
def test_hopeless_drafts_cost_next_to_nothing(num_requests: int, offers: float) -> None:
    world = World(dear_rows, num_requests, lambda _: 0.02, offers=offers, noise=0.0)
    assert world.run(None) > 0.97 * rate(world, 0)


@pytest.mark.parametrize("num_requests", [1, 4, 16])
def test_finding_out_costs_little(num_requests: int) -> None:
    """The first 100 steps of an engine, everything that it has to learn included."""
    world = World(dear_rows, num_requests, lambda _: 0.05, noise=0.0)
    assert world.run(None, 100, skip=0.0) > 0.93 * rate(world, 0)


@pytest.mark.parametrize("num_requests", [1, 16])
def test_it_turns_itself_up_again_when_text_gets_easy(num_requests: int) -> None:
    world = World(cheap_rows, num_requests, lambda part: 0.02 if part < 0.5 else 0.95)
    assert world.run(None) > 0.9 * rate(replace(world, chance=lambda _: 0.95), 6)


def test_a_drafter_that_is_dear_is_called_where_it_pays_and_not_elsewhere() -> None:
    good = World(cheap_rows, 1, lambda _: 0.9, draft_cost=0.004)
    bad = World(cheap_rows, 1, lambda _: 0.2, draft_cost=0.02)
    assert good.run(None) > 1.5 * rate(good, 0)
    assert bad.run(None) > 0.96 * rate(bad, 0)


@pytest.mark.parametrize("from_the_start", [True, False])
def test_a_neighbour_with_drafts_of_fixed_length_does_not_keep_others_from_drafting(from_the_start: bool) -> None:
    """Its drafts are a part of every step; those of the request that adapts are all accepted, and cost next to
    nothing."""
    policy = adaptive(others={"fixed": DrafterFacts(num_tokens=4, stateless=True)})
    asked: list[int] = []
    own = others = 0
    calls: list[DrafterCall] = []
    for step in range(1000):
        rounds = [DraftRound(seq_id=0, drafter="it", drafted=own, accepted=range(own))] if own else []
        seconds = 0.010 + 0.0001 * (2 + own + others)
        policy.observe(
            StepReport(
                num_requests=2,
                num_drafts=own,
                num_other_drafts=others,
                seconds=seconds,
                rounds=rounds,
                calls=calls,
            )
        )
        [wanted] = ask(policy, [0], 6, [np.ones(10, np.int32)], 2)
        calls = [call({0: wanted}, 0.00001)] if wanted else []
        others = 4 if from_the_start or step > 100 else 0
        own = 0
        if wanted:
            beside = [OtherDraft(seq_id=1, drafter="fixed", num_drafts=others)] if others else []
            drafts = [Draft([1] * wanted)]
            offered = OfferedDrafts(
                seq_ids=[0], drafters=["it"], drafts=drafts, num_known=[10], num_requests=2, others=beside
            )
            [own] = policy.keep(offered)
        asked.append(wanted)
    assert np.mean(np.array(asked[-300:]) == 6) > 0.95


def idle_from(facts: DrafterFacts, is_right: Callable[[int], bool], num_steps: int = 3000) -> list[bool]:
    """Of steps of one request whose drafts at step i are right or not: whether its drafter was idle."""
    policy = adaptive(facts)
    found: list[bool] = []
    count = 0
    calls: list[DrafterCall] = []
    for known in range(num_steps):
        rounds = [(0, count, range(count if is_right(known) else 0))] if count else []
        observe(policy, 1, 0.010 if count == 0 else 0.011, rounds, calls)
        # Token 1 is what a draft holds.
        text = np.array([1 if is_right(i) else 2 for i in range(known)], dtype=np.int32)
        [asked] = ask(policy, [0], 4, [text], 1)
        calls = [call({0: asked}, 0.002)] if asked else []
        count = keep(policy, {0: Draft([1] * asked)}, {0: known}, 1)[0] if asked else 0
        found.append(list(policy.idle_drafters(1)) == ["it"])
    return found


LAYERED = replace(FACTS, stateless=False, keeps_layers=True)


def test_a_drafter_with_layers_that_does_not_pay_becomes_idle() -> None:
    found = idle_from(LAYERED, lambda _: False, 1000)
    assert not found[60]
    assert all(found[300:])


LATE = replace(LAYERED, reads_late=True)


@pytest.mark.parametrize(
    ("facts", "right"), [(LAYERED, True), (replace(LAYERED, keeps_layers=False), False), (LATE, False)]
)
def test_one_that_pays_or_takes_nothing_in_is_never_idle(facts: DrafterFacts, right: bool) -> None:
    assert not any(idle_from(facts, lambda _: right, 1000))


def test_an_idle_drafter_that_begins_to_pay_is_idle_no_longer() -> None:
    found = idle_from(LAYERED, lambda step: step >= 1000)
    assert all(found[300:1000])
    assert not any(found[-500:])


@pytest.mark.parametrize(("take_in", "idle"), [(0.0001, False), (0.008, True)])
def test_drafts_that_pay_for_a_part_of_the_intake_alone_leave_it_idle(take_in: float, idle: bool) -> None:
    """One draft in two is right, and costs a tenth of a step: it is asked for wherever the intake is paid already."""
    policy = adaptive(LAYERED)
    for step in range(400):
        observe(policy, 1, 0.010, calls=[call({0: 0}, take_in), call({0: 1}, take_in + 0.0005)])
        observe(policy, 1, 0.0105, [(0, 1, [0] if step % 2 else [])])
        [asked] = ask(policy, [0], 1, [np.ones(10, np.int32)], 1)
    assert asked == 1
    assert bool(policy.idle_drafters(1)) == idle


def late_reader(reading: float) -> AdaptiveLength:
    """A policy that knows that three drafts out of four are right, that a step takes 10 ms and hardly more with drafts,
    and what reading 100 positions takes."""
    policy = adaptive(LATE)
    late = replace(call({0: 4}, 0.0), seconds=None, num_late=100, late_seconds=reading + 0.001)
    for _ in range(60):
        observe(policy, 1, 0.010, calls=[call({0: 4}, 0.001), late])
        observe(policy, 1, 0.011, [(0, 4, [0, 1, 2])])
    return policy


@pytest.mark.parametrize("reading", [0.0, 0.03, 0.3])
def test_a_prompt_is_read_once_drafts_would_have_saved_as_much(reading: float) -> None:
    """At four tokens for the time of 1.2 steps, a step of 10 ms saves 7 ms."""
    policy, text = late_reader(reading), np.ones(10, np.int32)
    num_waited = 0
    while not ask(policy, [1], 4, [text], 1, [100])[0]:
        observe(policy, 1, 0.010)
        num_waited += 1
        assert num_waited < 100
    assert 0.005 * num_waited <= reading <= 0.010 * (num_waited + 1)
    # It reads on while there is more to read, and drafts once there is not.
    assert ask(policy, [1], 4, [text], 1, [60])[0] > 0
    assert ask(policy, [1], 4, [text], 1, [0])[0] > 0


def test_a_late_reader_that_misses_a_step_catches_up_at_once() -> None:
    policy, text = late_reader(0.03), np.ones(10, np.int32)
    assert ask(policy, [0], 4, [text], 1, [0])[0] > 0
    assert ask(policy, [0], 4, [text], 1, [1])[0] > 0


def test_a_look_whether_drafts_pay_again_waits_until_its_reading_is_earned() -> None:
    policy, text = adaptive(LATE), np.ones(10, np.int32)
    late = replace(call({0: 1}, 0.0), seconds=None, num_late=100, late_seconds=0.05)
    for _ in range(60):
        observe(policy, 1, 0.010, calls=[call({0: 1}, 0.001), late])
        observe(policy, 1, 0.015, [(0, 1, [])])
    looks = []
    for step in range(4000):
        observe(policy, 1, 0.010)
        if ask(policy, [1], 4, [text], 1, [100])[0]:
            looks.append(step)
    # 0.4% of the time: 50 ms in 12.5 s.
    assert looks
    assert len(looks) * 0.05 <= 0.005 * 4000 * 0.010 + 0.05


def test_a_drafter_is_not_idle_at_a_size_where_it_paid() -> None:
    """Drafts pay for one request and not for sixteen; that a batch dwindles to one does not make it forget."""
    policy = adaptive(LAYERED)
    for num_requests, row_cost in ((1, 0.0001), (16, 0.1), (1, 0.0001)):
        seq_ids = list(range(num_requests))
        known = [np.ones(10, np.int32)] * num_requests
        for _ in range(400):
            observe(policy, num_requests, 0.010, calls=[call(dict.fromkeys(seq_ids, 1), 0.0001)])
            observe(policy, num_requests, 0.010 + row_cost, [(seq_id, 1, [0]) for seq_id in seq_ids])
            ask(policy, seq_ids, 4, known, num_requests)
        assert bool(policy.idle_drafters(num_requests)) == (num_requests == 16)
    assert policy.idle_drafters(16)


def test_nothing_is_asked_before_it_is_known_what_a_step_costs() -> None:
    assert ask(adaptive(), [0], 6, [np.ones(10, np.int32)], 1) == [0]
