"""Groups and order: everyone runs as often, on the same prompts, at the same mean time."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dovetail.spec_decode.experiments.plan import make_groups, make_turns


@given(prompts=st.integers(1, 60), batch=st.integers(1, 16), seed=st.integers(0, 9))
def test_groups_are_full_and_leave_nobody_out(prompts: int, batch: int, seed: int) -> None:
    batch = min(batch, prompts)
    groups = make_groups(prompts, batch, seed)
    assert len(groups) == -(-prompts // batch)
    assert all(len(set(group)) == batch for group in groups)
    assert {place for group in groups for place in group} == set(range(prompts))


@given(arms=st.integers(2, 6), groups=st.integers(1, 8), repetitions=st.integers(1, 4), seed=st.integers(0, 9))
def test_every_arm_runs_every_group_in_every_repetition(arms: int, groups: int, repetitions: int, seed: int) -> None:
    turns = make_turns(range(arms), make_groups(groups, 1, seed), repetitions, "abba", seed)
    counted = Counter((turn.what, turn.repetition, turn.group) for turn in turns)
    assert len(counted) == arms * groups * repetitions
    assert set(counted.values()) == {1}
    assert len({(turn.group, turn.prompts) for turn in turns}) == groups


@given(arms=st.integers(2, 6), pairs=st.integers(1, 5), seed=st.integers(0, 9))
def test_a_linear_drift_cancels_over_an_even_number_of_rounds(arms: int, pairs: int, seed: int) -> None:
    turns = make_turns(range(arms), make_groups(2 * pairs, 1, seed), 1, "abba", seed)
    places = {arm: [place for place, turn in enumerate(turns) if turn.what == arm] for arm in range(arms)}
    assert len({sum(own) for own in places.values()}) == 1


def test_the_order_is_drawn_anew_and_repeats_with_its_seed() -> None:
    orders = [[turn.what for turn in make_turns("abcdef", make_groups(6, 1, 0), 1, "abba", seed)] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    rounds = [tuple(orders[0][start : start + 6]) for start in range(0, 36, 6)]
    assert rounds[1] == rounds[0][::-1]
    assert rounds[2] not in rounds[:2]


@given(turns=st.lists(st.integers(1, 3), min_size=1, max_size=20), batch=st.integers(1, 6), seed=st.integers(0, 9))
def test_turns_of_a_conversation_share_groups_with_few_others(turns: list[int], batch: int, seed: int) -> None:
    conversations = [index for turn in range(3) for index, count in enumerate(turns) if turn < count]
    groups = make_groups(len(conversations), batch, seed, conversations)
    assert {place for group in groups for place in group} == set(range(len(conversations)))
    assert {len(group) for group in groups} == {batch}
    met: dict[int, set[int]] = {}
    full = (len(turns) // batch) * batch
    for group in groups:
        for place in group:
            met.setdefault(conversations[place], set()).update(conversations[place] for place in group)
    if full == len(turns):
        assert all(len(others) == batch for others in met.values())
