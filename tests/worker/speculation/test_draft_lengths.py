"""The policy against simulated machines and texts, with a clock that only the simulation turns."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.speculation import Draft
from dovetail.worker.speculation.draft_lengths import DraftLengths, LengthSetting

GREEDY = SamplingParams(temperature=0)
ADAPTIVE = LengthSetting(num_tokens=6, length="adaptive", stateless=True)


def cheap_rows(num_requests: int, num_rows: int) -> float:
    """As on an accelerator: rows are nearly free, until there are many."""
    return max(0.010, 0.0001 * num_rows) + 0.0001 * (num_rows > num_requests)


def dear_rows(num_requests: int, num_rows: int) -> float:
    """As on a CPU with packed weights: every row is work."""
    return 0.004 + 0.003 * num_rows


@dataclass
class World:
    """Requests that decode for ever, of which each draft stands with a chance that may change."""

    cost: Callable[[int, int], float]
    num_requests: int
    chance: Callable[[float], float]
    draft_cost: float = 0.00003
    offers: float = 1.0
    """Chance that the drafter has anything to offer."""
    noise: float = 0.03
    """Spread of a step's seconds; where there is any, one step in a hundred takes five times as long."""
    seed: int = 0

    def run(self, setting: LengthSetting, num_steps: int = 1500, skip: float = 0.5) -> float:
        """Tokens per second after the first part of the steps."""
        draw = random.Random(self.seed)
        lengths = DraftLengths({"it": setting}, strict=False, disable_by_batch_size=None)
        keys = list(range(self.num_requests))
        for key in keys:
            lengths.add(key, "it", GREEDY)
        known = np.full(self.num_requests, 100)
        drafts: dict[int, Draft] = {}
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
            lengths.measured(self.num_requests, num_rows, seconds)
            for key in keys:
                come = 1
                if key in drafts:
                    count = len(drafts[key].token_ids)
                    stood = next((i for i in range(count) if draw.random() >= chance), count)
                    lengths.judged(key, count, range(stood))
                    come += stood
                known[key] += come
                tokens += come
            # Token 1 is what comes; a guess is 1 where it would stand.
            text = np.ones(int(known.max()), dtype=np.int32)
            for key in keys:
                lengths.compare(key, text[: known[key]])
            asked = lengths.ask("it", keys, np.full(len(keys), setting.num_tokens), len(keys))
            called = [key for key in keys if asked[key]]
            if called:
                clock += self.draft_cost * len(called)
                lengths.called("it", [int(asked[key]) for key in called], self.draft_cost * len(called))
            offered = {}
            for key in called:
                has = draw.random() < self.offers
                lengths.offered(key, int(asked[key]), int(asked[key]) if has else 0)
                if has:
                    offered[key] = Draft([1 if draw.random() < chance else 2 for _ in range(asked[key])])
            drafts = lengths.keep(offered, {k: k for k in offered}, {k: int(known[k]) for k in offered}, len(keys))
        return (tokens - half[1]) / (clock - half[0])


def rate(world: World, length: int) -> float:
    """Of a fixed length; 0 is plain decoding."""
    if length == 0:
        disturbed = 1.04 if world.noise else 1.0
        return world.num_requests / (world.cost(world.num_requests, world.num_requests) * disturbed)
    return world.run(LengthSetting(num_tokens=length, stateless=True))


WORLDS = {
    f"{cost.__name__} {num_requests} {chance}": World(cost, num_requests, lambda _, c=chance: c)  # type: ignore[misc]
    for cost in (cheap_rows, dear_rows)
    for num_requests in (1, 4, 16)
    for chance in (0.05, 0.3, 0.6, 0.95)
}


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_never_far_from_the_best_fixed_length(world: World) -> None:
    best = max(rate(world, length) for length in (0, 1, 2, 4, 6))
    assert world.run(ADAPTIVE) > 0.93 * best


@pytest.mark.parametrize("offers", [0.1, 1.0])
@pytest.mark.parametrize("num_requests", [1, 4, 16])
def test_hopeless_drafts_cost_next_to_nothing(num_requests: int, offers: float) -> None:
    world = World(dear_rows, num_requests, lambda _: 0.02, offers=offers, noise=0.0)
    assert world.run(ADAPTIVE) > 0.97 * rate(world, 0)


@pytest.mark.parametrize("num_requests", [1, 4, 16])
def test_finding_out_costs_little(num_requests: int) -> None:
    """The first 100 steps of an engine, everything that it has to learn included."""
    world = World(dear_rows, num_requests, lambda _: 0.05, noise=0.0)
    assert world.run(ADAPTIVE, 100, skip=0.0) > 0.93 * rate(world, 0)


@pytest.mark.parametrize("num_requests", [1, 16])
def test_it_turns_itself_up_again_when_text_gets_easy(num_requests: int) -> None:
    world = World(cheap_rows, num_requests, lambda part: 0.02 if part < 0.5 else 0.95)
    assert world.run(ADAPTIVE) > 0.9 * rate(replace(world, chance=lambda _: 0.95), 6)


def test_a_drafter_that_is_dear_is_called_where_it_pays_and_not_elsewhere() -> None:
    good = World(cheap_rows, 1, lambda _: 0.9, draft_cost=0.004)
    bad = World(cheap_rows, 1, lambda _: 0.2, draft_cost=0.02)
    assert good.run(ADAPTIVE) > 1.5 * rate(good, 0)
    assert bad.run(ADAPTIVE) > 0.96 * rate(bad, 0)


@pytest.mark.parametrize("from_the_start", [True, False])
def test_a_neighbour_with_drafts_of_fixed_length_does_not_keep_others_from_drafting(from_the_start: bool) -> None:
    """Its drafts are a part of every step; those of the request that adapts all stand, and cost next to nothing."""
    fixed = LengthSetting(num_tokens=4, stateless=True)
    lengths = DraftLengths({"it": ADAPTIVE, "fixed": fixed}, strict=False, disable_by_batch_size=None)
    lengths.add(0, "it", GREEDY)
    lengths.add(1, "fixed", GREEDY)
    asked, drafts, seen = [], dict[int, Draft](), 0
    for step in range(1000):
        num_rows = 2 + sum(len(draft.token_ids) for draft in drafts.values())
        lengths.measured(2, num_rows, 0.010 + 0.0001 * num_rows)
        if 0 in drafts:
            seen = len(drafts[0].token_ids)
            lengths.judged(0, seen, range(seen))
        wanted = int(lengths.ask("it", [0], np.array([6]), 2)[0])
        offered = {0: Draft([1] * wanted)} if wanted else {}
        if from_the_start or step > 100:
            offered[1] = Draft([1] * 4)
        if wanted:
            lengths.called("it", [wanted], 0.00001)
            lengths.offered(0, wanted, wanted)
        drafts = lengths.keep(offered, {0: 0, 1: 1}, {0: 10, 1: 10}, 2)
        asked.append(wanted)
    assert np.mean(np.array(asked[-300:]) == 6) > 0.95


def idle_from(setting: LengthSetting, stands: Callable[[int], bool], num_steps: int = 3000) -> list[bool]:
    """Of steps of one request whose drafts at step i stand or not: whether its drafter was idle."""
    lengths = DraftLengths({"it": setting}, strict=False, disable_by_batch_size=None)
    lengths.add(0, "it", GREEDY)
    found, count = [], 0
    for known in range(num_steps):
        lengths.measured(1, 1 + count, 0.010 if count == 0 else 0.011)
        if count:
            lengths.judged(0, count, range(count if stands(known) else 0))
        # Token 1 is what a draft holds.
        lengths.compare(0, np.array([1 if stands(i) else 2 for i in range(known)], dtype=np.int32))
        asked, count = int(lengths.ask("it", [0], np.array([4]), 1)[0]), 0
        if asked:
            lengths.called("it", [asked], 0.002)
            lengths.offered(0, asked, asked)
            kept = lengths.keep({0: Draft([1] * asked)}, {0: 0}, {0: known}, 1)
            count = len(kept[0].token_ids) if kept else 0
        found.append(lengths.idle(1) == {"it"})
    return found


LAYERED = replace(ADAPTIVE, stateless=False, kv_cache=True)


def test_a_drafter_with_layers_that_does_not_pay_becomes_idle() -> None:
    found = idle_from(LAYERED, lambda _: False, 1000)
    assert not found[60]
    assert all(found[300:])


@pytest.mark.parametrize(("setting", "stood"), [(LAYERED, True), (replace(LAYERED, kv_cache=False), False)])
def test_one_that_pays_or_takes_nothing_in_is_never_idle(setting: LengthSetting, stood: bool) -> None:
    assert not any(idle_from(setting, lambda _: stood, 1000))


def test_an_idle_drafter_that_begins_to_pay_is_idle_no_longer() -> None:
    found = idle_from(LAYERED, lambda step: step >= 1000)
    assert all(found[300:1000])
    assert not any(found[-500:])


@pytest.mark.parametrize(("take_in", "idle"), [(0.0001, False), (0.008, True)])
def test_drafts_that_pay_for_a_part_of_the_intake_alone_leave_it_idle(take_in: float, idle: bool) -> None:
    """One draft in two stands, and costs a tenth of a step: it is asked for wherever the intake is paid already."""
    lengths = DraftLengths({"it": LAYERED}, strict=False, disable_by_batch_size=None)
    lengths.add(0, "it", GREEDY)
    for step in range(400):
        lengths.measured(1, 1, 0.010)
        lengths.measured(1, 2, 0.0105)
        lengths.called("it", [0], take_in)
        lengths.called("it", [1], take_in + 0.0005)
        lengths.judged(0, 1, [0] if step % 2 else [])
        asked = int(lengths.ask("it", [0], np.array([1]), 1)[0])
    assert asked == 1
    assert bool(lengths.idle(1)) == idle


def test_a_drafter_is_not_idle_at_a_size_where_it_paid() -> None:
    """Drafts pay for one request and not for sixteen; that a batch dwindles to one does not make it forget."""
    lengths = DraftLengths({"it": LAYERED}, strict=False, disable_by_batch_size=None)
    for key in range(16):
        lengths.add(key, "it", GREEDY)
    for num_requests, row_cost in ((1, 0.0001), (16, 0.1), (1, 0.0001)):
        keys = list(range(num_requests))
        for _ in range(400):
            lengths.measured(num_requests, num_requests, 0.010)
            lengths.measured(num_requests, 2 * num_requests, 0.010 + row_cost)
            lengths.called("it", [1] * num_requests, 0.0001)
            for key in keys:
                lengths.judged(key, 1, [0])
            lengths.ask("it", keys, np.full(num_requests, 4), num_requests)
        assert bool(lengths.idle(num_requests)) == (num_requests == 16)
    assert lengths.idle(16)


def asked(setting: LengthSetting, sampling: SamplingParams, *, strict: bool = False) -> tuple[int, bool]:
    """How many drafts are asked for, and whether they may be drawn."""
    lengths = DraftLengths({"it": setting}, strict=strict, disable_by_batch_size=None)
    lengths.add(0, "it", sampling)
    return int(lengths.ask("it", [0], np.array([setting.num_tokens]), 1)[0]), lengths.draws(0)


def test_nothing_is_asked_before_it_is_known_what_a_step_costs() -> None:
    assert asked(ADAPTIVE, GREEDY) == (0, False)


@pytest.mark.parametrize(
    ("sampling", "strict", "draws"),
    [
        (GREEDY, True, False),
        (SamplingParams(temperature=1.0), False, True),
        (SamplingParams(temperature=1.0, seed=1), False, False),
        (SamplingParams(temperature=1.0), True, False),
    ],
)
def test_where_tokens_would_hang_on_the_clock_drafts_are_not_drawn(
    sampling: SamplingParams, strict: bool, draws: bool
) -> None:
    assert asked(replace(ADAPTIVE, draws=True), sampling, strict=strict) == (0, draws)
    assert asked(ADAPTIVE, sampling, strict=strict) == (0, False), "a drafter that never draws"


def test_a_fixed_length_draws_for_seeds_too() -> None:
    setting = LengthSetting(num_tokens=4, draws=True)
    assert asked(setting, SamplingParams(temperature=1.0, seed=1)) == (4, True)
