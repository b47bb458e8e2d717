"""Cuts a model's layers into pipeline stages of equal cost."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from dovetail.nn.loading import num_parameters
from dovetail.nn.planning import Create, planning_context


@dataclass(frozen=True)
class StageCosts:
    """Weights that a decode step reads, which is what takes its time where batches are small."""

    layers: tuple[int, ...]
    """Of each decoder layer."""
    output: int
    """Of the final norm and the output layer, which the last stage has besides its layers. The table of embeddings is
    looked up, and costs memory only."""


def stage_costs(create: Create, config: Mapping[str, Any], num_layers: int) -> StageCosts:
    """Builds each layer once, without memory. `create` is that of a family with the capability `stages`. Raises
    `ModelError` as it does."""

    def count(layer: int, *, is_last: bool) -> int:
        context = replace(
            planning_context(), layers=range(layer, layer + 1), is_first_stage=False, is_last_stage=is_last
        )
        module = create(config, context)
        assert isinstance(module, torch.nn.Module)
        return num_parameters(module)

    layers = tuple(count(layer, is_last=False) for layer in range(num_layers))
    return StageCosts(layers, count(num_layers - 1, is_last=True) - layers[-1])


def cut(costs: StageCosts, num_stages: int) -> tuple[int, ...]:
    """Returns how many layers each of `num_stages` stages gets, 1 at least, so that the dearest stage costs as little
    as can be, then the second dearest, and so on: the output layer may outweigh all, and the others share evenly then.
    Of equals it is the one whose earlier stages have more layers, since the last one samples besides."""
    num_layers = len(costs.layers)
    sums = [0, *itertools.accumulate(costs.layers)]

    def cost(start: int, stop: int) -> int:
        return sums[stop] - sums[start] + (costs.output if stop == num_layers else 0)

    # By number of leading layers: costs of their stages, the dearest first, and the stages' layers, negated so that
    # many come first. Of two cuts of the same leading layers the better one is so with any stage behind it too.
    best: dict[int, tuple[list[int], tuple[int, ...]]] = {
        stop: ([cost(0, stop)], (-stop,)) for stop in range(1, num_layers + 1)
    }
    for stage in range(1, num_stages):
        best = {
            stop: min(
                (sorted([*best[start][0], cost(start, stop)], reverse=True), (*best[start][1], start - stop))
                for start in range(stage, stop)
            )
            for stop in range(stage + 1, num_layers + 1)
        }
    return tuple(-count for count in best[num_layers][1])
