"""Who runs when: groups of prompts, and the order of arms within each round."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
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


def make_groups(num_prompts: int, batch_size: int, seed: int) -> list[tuple[int, ...]]:
    """Prompts that are in flight together: `batch_size` each, mixed by seed. A rest that fills no group is filled up
    from the beginning, so that every group has the same load."""
    places = list(range(num_prompts))
    random.Random(seed).shuffle(places)
    count = -(-num_prompts // batch_size)
    return [
        tuple(places[(group * batch_size + index) % num_prompts] for index in range(batch_size))
        for group in range(count)
    ]


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
