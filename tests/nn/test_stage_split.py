"""Stages of equal cost, against all ways to cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from dovetail.nn.stage_split import StageCosts, cut, stage_costs
from dovetail.plugins.model_families.moe import MoEFamily
from dovetail.testing.tiny_models import tiny_config


def every_cut(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """All ways to give each stage one layer at least."""
    for ends in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield tuple(stop - start for start, stop in itertools.pairwise((0, *ends, num_layers)))


def stage_weights(costs: StageCosts, layers: tuple[int, ...]) -> list[int]:
    """The dearest first."""
    given = iter(costs.layers)
    stages = [sum(itertools.islice(given, count)) for count in layers]
    stages[-1] += costs.output
    return sorted(stages, reverse=True)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_has_a_cheaper_dearest_stage(seed: int) -> None:
    """Nor, of those that are equal in this, a cheaper second; of equals the earlier stages have more layers."""
    rng = np.random.default_rng(seed)
    num_layers = int(rng.integers(1, 9))
    costs = StageCosts(tuple(rng.integers(1, 6, num_layers).tolist()), int(rng.integers(0, 15)))
    for num_stages in range(1, num_layers + 1):
        best = min(every_cut(num_layers, num_stages), key=lambda one: (stage_weights(costs, one), [-n for n in one]))
        assert cut(costs, num_stages) == best


def test_where_the_output_layer_outweighs_all_the_others_share_evenly() -> None:
    assert cut(StageCosts((1,) * 13, 20), 4) == (4, 4, 4, 1)


def test_costs_are_the_weights_of_layers_and_of_what_follows_the_last() -> None:
    """The table of embeddings costs no step anything."""
    tiny = tiny_config("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[0], intermediate_size=32)
    config = tiny.to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}
    costs = stage_costs(MoEFamily(MoEFamily.Options()).create, config, 3)
    assert costs.layers[1] == costs.layers[2] > costs.layers[0]  # experts weigh more than one MLP
    assert costs.output == (config["vocab_size"] + 1) * config["hidden_size"]
