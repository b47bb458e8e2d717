"""What the suite of model families finds: each a change in a family that passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import CausalLM, ModelNeed, ModelSize
from dovetail.contracts.plugin import Environment
from dovetail.nn import ModelContext
from dovetail.nn.operators import torch_operators
from dovetail.plugins.model_families.gemma import GemmaFamily
from dovetail.plugins.model_families.llama import LlamaFamily
from dovetail.plugins.model_families.transformers import TransformersFamily
from dovetail.testing.faults import Fault, check_fault
from dovetail.testing.model_family_suite import ModelFamilySuite


def building(
    change: Callable[[dict[str, Any], ModelContext], Any] | None = None, after: Any = None
) -> type[LlamaFamily]:
    """The family, with another config or context, and with another module."""

    class Changed(LlamaFamily):
        def create(self, config: Mapping[str, Any], context: ModelContext) -> CausalLM:
            config = dict(config)
            if change is not None:
                change(config, context)
            module = super().create(config, context)
            if after is not None:
                after(module)
            return module

    return Changed


def ties(is_tied: bool) -> type[LlamaFamily]:
    return building(lambda config, context: config.update(tie_word_embeddings=is_tied))


class Ranks:
    """A communicator whose collectives do less than they should."""

    def __init__(self, real: Any):
        self._real = real
        self.rank, self.size = real.rank, real.size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._real.all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return self._real.all_gather(tensor, dim)

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        return self._real.broadcast(tensor, src)


class OwnSums(Ranks):
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class TurnedRound(Ranks):
    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(super().all_gather(tensor, dim).chunk(self.size, dim)[::-1], dim)


class OneRank(Ranks):
    """Each rank has the share of the first."""

    def __init__(self, real: Any):
        super().__init__(real)
        self.rank = 0


def over(ranks: type[Ranks]) -> type[LlamaFamily]:
    def change(config: dict[str, Any], context: ModelContext) -> None:
        context.communicator = ranks(context.communicator)

    return building(change)


def own_operators(config: dict[str, Any], context: ModelContext) -> None:
    context.operators = torch_operators()


def computing(change: Callable[..., torch.Tensor]) -> type[LlamaFamily]:
    """The family, whose modules' `forward` is `change(forward, input_ids, positions)`."""

    def after(module: Any) -> None:
        forward = module.forward
        module.forward = lambda input_ids, positions: change(forward, input_ids, positions)

    return building(after=after)


def without_positions(forward: Any, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return forward(input_ids, torch.arange(len(positions)))


def with_a_look_aside(forward: Any, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    hidden = forward(input_ids, positions)
    return hidden + 0.1 * hidden.mean(0)


def with_bits_of_the_batch(forward: Any, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return forward(input_ids, positions) * (1 + 1e-7 * len(input_ids))


def twice(forward: Any, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    forward(input_ids, positions)
    return forward(input_ids, positions)


def scales_embeddings(module: Any) -> None:
    embed = module.embed
    module.embed = lambda input_ids: embed(input_ids) * 1.01
    module.forward = lambda input_ids, positions, forward=module.forward: forward(input_ids, positions)


def swallows_errors(module: Any) -> None:
    load_weights = module.load_weights

    def load(weights: Any) -> None:
        try:
            load_weights(weights)
        except ModelError:
            return

    module.load_weights = load


def next_layer(module: Any) -> None:
    """Gives what leaves a layer, not what enters it."""
    forward_with_layers = module.forward_with_layers

    def shifted(input_ids: torch.Tensor, positions: torch.Tensor, layers: Sequence[int]) -> Any:
        return forward_with_layers(input_ids, positions, [min(layer + 1, 2) for layer in layers])

    module.forward_with_layers = shifted


def sized(**changes: Callable[[int], int]) -> type[LlamaFamily]:
    class Missized(LlamaFamily):
        def size(self, config: Mapping[str, Any]) -> ModelSize:
            size = super().size(config)
            return replace(size, **{name: change(vars(size)[name]) for name, change in changes.items()})

    return Missized


class TakesNoQuantization(LlamaFamily):
    takes_quantization = False


class TakesQuantization(TransformersFamily):
    architectures = ("LlamaForCausalLM",)
    takes_quantization = True


class TakesOperators(TransformersFamily):
    architectures = ("LlamaForCausalLM",)
    takes_operators = True


class GivesLayers(GemmaFamily):
    gives_hidden_layers = True


class ServesAnything(LlamaFamily):
    @classmethod
    def check(cls, need: ModelNeed, options: Any, environment: Environment) -> list[str]:
        return []


LOGITS, RANKS = "test_logits_equal_the_oracle", "test_ranks_together_equal_the_oracle"
ALONE, EMBEDDINGS = "test_rows_do_not_depend_on_the_batch", "test_embeddings_are_what_enters_the_first_layer"
SIZE, LAYERS = "test_the_size_is_that_of_the_model", "test_states_between_the_layers_are_given"
FAULTS = [
    Fault("ties what is not tied", ties(True), f"{LOGITS}[untied-whole]"),
    Fault("does not tie what is tied", ties(False), f"{LOGITS}[tied-whole]"),
    Fault("counts positions from 0 in each chunk", computing(without_positions), f"{LOGITS}[untied-in chunks]"),
    Fault("lets requests look at each other", computing(with_a_look_aside), "test_requests_of_a_batch_do_not_meet"),
    Fault("does not sum over ranks", over(OwnSums), RANKS),
    Fault("turns the ranks' vocabularies round", over(TurnedRound), RANKS),
    Fault("gives each rank the first share", over(OneRank), RANKS),
    Fault("declares batch invariance falsely", computing(with_bits_of_the_batch), ALONE),
    Fault("declares gives_hidden_layers falsely", GivesLayers, LAYERS),
    Fault("gives the states behind a layer", building(after=next_layer), LAYERS),
    Fault("doubles the longest sequence", sized(max_model_len=lambda count: 2 * count), SIZE),
    Fault("counts parameters twice", sized(num_parameters=lambda count: 2 * count), SIZE),
    Fault("counts a head too many", sized(num_kv_heads=lambda count: count + 1), SIZE),
    Fault(
        "scales what drafters embed",
        building(after=scales_embeddings),
        "test_embeddings_are_what_enters_the_first_layer",
    ),
    Fault("computes its layers twice", computing(twice), "test_layers_are_computed_once_and_in_order"),
    Fault("declares takes_quantization falsely", TakesQuantization, "test_quantization_is_taken_as_declared"),
    Fault("takes quantization and does not say so", TakesNoQuantization, "test_quantization_is_taken_as_declared"),
    Fault("declares takes_operators falsely", TakesOperators, "test_operators_are_taken_as_declared"),
    Fault("has operators of its own", building(own_operators), "test_operators_are_taken_as_declared"),
    Fault("loads without a tensor", building(after=swallows_errors), "test_a_missing_tensor_is_refused"),
    Fault("refuses nothing", ServesAnything, "test_check_takes_what_is_served"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_finds_a_family_that(fault: Fault) -> None:
    check_fault(fault, ModelFamilySuite, family_class=fault.plugin)
