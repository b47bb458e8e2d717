"""Who runs when: groups of prompts, and the order of arms within each round."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice, zip_longest
from typing import Generic, Literal, TypeVar

from dovetail.spec_decode.experiments.schema import Experiment

T = TypeVar("T")


@dataclass(frozen=True)
class Turn(Generic[T]):
    """One group of prompts in one arm."""

    what: T
    repetition: int
    group: int
    """The same prompts in every arm and repetition."""
    prompts: tuple[int, ...]
    """Places in the data set."""


def make_groups(
    num_prompts: int, batch_size: int, seed: int, conversations: Sequence[int] | None = None
) -> list[tuple[int, ...]]:
    """Prompts that are in flight together: `batch_size` each, mixed by seed. A rest that fills no group is filled up,
    so that every group has the same load.

    Args:
        conversations: of each prompt, where some are later turns of others. As many conversations as a group has
            prompts share groups with each other and with nobody else, so that what their turns have in common stays
            in these groups; a rest is filled up from them, if there are enough. Without: each prompt is alone.
    """
    turns: dict[int, list[int]] = {}
    for place in range(num_prompts):
        turns.setdefault(place if conversations is None else conversations[place], []).append(place)
    mixed = list(turns.values())
    random.Random(seed).shuffle(mixed)
    everybody = [place for own in mixed for place in own]
    groups = []
    for start in range(0, len(mixed), batch_size):
        by_turn = zip_longest(*mixed[start : start + batch_size])
        together = [place for row in by_turn for place in row if place is not None]
        for first in range(0, len(together), batch_size):
            group = together[first : first + batch_size]
            others = [place for place in dict.fromkeys([*together, *everybody]) if place not in group]
            groups.append(tuple(islice(chain(group, cycle(others or group)), batch_size)))
    return groups


def make_turns(
    arms: Sequence[T],
    groups: Sequence[tuple[int, ...]],
    repetitions: int,
    order: Literal["abba", "random"],
    seed: int,
) -> list[Turn[T]]:
    """All turns, one round per repetition and group; every arm runs once in each round.

    "abba": of each two rounds, the second goes through the arms in the reverse of the first's drawn order, so that over
    both every arm has the same mean position, and a drift that is linear in time cancels.
    """
    draw = random.Random(seed)
    turns: list[Turn[T]] = []
    row: list[T] = list(arms)
    number = 0
    for repetition in range(repetitions):
        for group, prompts in enumerate(groups):
            if order == "random" or number % 2 == 0:
                draw.shuffle(row)
            else:
                row.reverse()
            number += 1
            turns += [Turn(arm, repetition, group, prompts) for arm in row]
    return turns


def num_turns(experiment: Experiment, num_variants: int, num_prompts: int) -> int:
    """Groups that will run, warm-up included."""
    return sum(
        num_variants * (experiment.warmup + experiment.repetitions * -(-num_prompts // batch))
        for batch in experiment.grid.batch_sizes
    )
