"""What the suite of model families finds: each a change in a family that passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import AdapterRows, CausalLM, ModelInputs, ModelNeed, ModelOutputs, ModelSize
from dovetail.contracts.plugin import Environment
from dovetail.nn import ModelContext, expected_shapes
from dovetail.nn.operators import torch_operators
from dovetail.plugins.model_families.gemma import GemmaFamily
from dovetail.plugins.model_families.llama import LlamaFamily
from dovetail.plugins.model_families.transformers import TransformersFamily
from dovetail.testing._session import run_class
from dovetail.testing.capabilities import Capability
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


def computing(change: Callable[[Any, ModelInputs], ModelOutputs]) -> type[LlamaFamily]:
    """The family, whose modules' `forward` is `change(forward, inputs)`."""

    def after(module: Any) -> None:
        forward = module.forward
        module.forward = lambda inputs: change(forward, inputs)

    return building(after=after)


def without_positions(forward: Any, inputs: ModelInputs) -> ModelOutputs:
    return forward(replace(inputs, positions=torch.arange(len(inputs.positions))))


def with_a_look_aside(forward: Any, inputs: ModelInputs) -> ModelOutputs:
    hidden = forward(inputs).hidden
    return ModelOutputs(hidden=hidden + 0.1 * hidden.mean(0))


def with_bits_of_the_batch(forward: Any, inputs: ModelInputs) -> ModelOutputs:
    return ModelOutputs(hidden=forward(inputs).hidden * (1 + 1e-7 * len(inputs.positions)))


def twice(forward: Any, inputs: ModelInputs) -> ModelOutputs:
    forward(inputs)
    return forward(inputs)


def next_layer(forward: Any, inputs: ModelInputs) -> ModelOutputs:
    """Gives what leaves a layer, not what enters it."""
    return forward(replace(inputs, layers=tuple(min(layer + 1, 2) for layer in inputs.layers)))


def leaves_out_none(forward: Any, inputs: ModelInputs) -> ModelOutputs:
    return forward(replace(inputs, skipped_layers=frozenset()))


def scales_embeddings(module: Any) -> None:
    embed = module.embed
    module.embed = lambda input_ids: embed(input_ids) * 1.01


def swallows_errors(module: Any) -> None:
    load_weights = module.load_weights

    def load(weights: Any, partial: bool = False) -> None:
        try:
            load_weights(weights, partial)
        except ModelError:
            return

    module.load_weights = load


def resets_the_others(module: Any) -> None:
    load_weights = module.load_weights

    def load(weights: Any, partial: bool = False) -> None:
        given = dict(weights)
        if partial:
            given = {name: torch.zeros(shape) for name, shape in expected_shapes(module).items()} | given
        load_weights(given.items(), partial)

    module.load_weights = load


def takes_unknown_names(module: Any) -> None:
    load_weights = module.load_weights

    def load(weights: Any, partial: bool = False) -> None:
        known = expected_shapes(module)
        load_weights([(name, tensor) for name, tensor in weights if not partial or name in known], partial)

    module.load_weights = load


def ignores_embeddings(forward: Any, inputs: ModelInputs) -> ModelOutputs:
    ids = torch.zeros_like(inputs.positions) if inputs.input_ids is None else inputs.input_ids
    return forward(replace(inputs, input_ids=ids, embeddings=None))


def ignores_adapters(forward: Any, inputs: ModelInputs) -> ModelOutputs:
    return forward(replace(inputs, adapters=None))


def takes_the_first_slot(forward: Any, inputs: ModelInputs) -> ModelOutputs:
    if inputs.adapters is None:
        return forward(inputs)
    return forward(replace(inputs, adapters=AdapterRows(slots=torch.zeros_like(inputs.adapters.slots))))


def without_adapters_in_mlps(config: dict[str, Any], context: ModelContext) -> None:
    if context.adapters is not None:
        register = context.adapters.register

        def register_some(context: ModelContext, parts: Any) -> Any:
            made = register(context, parts)
            if any("mlp" in part.source for part in parts):
                made.add = lambda y, x: y
            return made

        context.adapters.register = register_some


def leaves_rows_bound(module: Any) -> None:
    forward, space = module.forward, module._adapters

    def run(inputs: ModelInputs) -> ModelOutputs:
        outputs = forward(inputs)
        if inputs.adapters is not None:
            space.rows, space.groups = inputs.adapters, [(0, torch.arange(len(inputs.adapters.slots)))]
        return outputs

    module.forward = run


class TakesAdapters(TransformersFamily):
    architectures = ("LlamaForCausalLM",)
    capabilities = replace(TransformersFamily.capabilities, adapters=True)


def all_layers(config: dict[str, Any], context: ModelContext) -> None:
    context.held_layers = range


def one_layer_less(config: dict[str, Any], context: ModelContext) -> None:
    held_layers = context.held_layers
    if not (context.is_first_stage and context.is_last_stage):
        context.held_layers = lambda num_layers: held_layers(num_layers)[:-1]


def sized(**changes: Callable[[int], int]) -> type[LlamaFamily]:
    class Missized(LlamaFamily):
        def size(self, config: Mapping[str, Any]) -> ModelSize:
            size = super().size(config)
            return replace(size, **{name: change(vars(size)[name]) for name, change in changes.items()})

    return Missized


class TakesNoQuantization(LlamaFamily):
    capabilities = replace(LlamaFamily.capabilities, quantization=False)


class TakesQuantization(TransformersFamily):
    architectures = ("LlamaForCausalLM",)
    capabilities = replace(TransformersFamily.capabilities, quantization=True)


class TakesOperators(TransformersFamily):
    architectures = ("LlamaForCausalLM",)
    capabilities = replace(TransformersFamily.capabilities, operators=True)


class GivesLayers(GemmaFamily):
    capabilities = replace(GemmaFamily.capabilities, hidden_layers=True)


class TakesStages(TransformersFamily):
    architectures = ("LlamaForCausalLM",)
    capabilities = replace(TransformersFamily.capabilities, stages=True)


class TakesNoStages(LlamaFamily):
    capabilities = replace(LlamaFamily.capabilities, stages=False)


class ServesAnything(LlamaFamily):
    @classmethod
    def check(cls, need: ModelNeed, options: Any, environment: Environment) -> list[str]:
        return []


LOGITS, RANKS = "test_logits_equal_the_oracle", "test_ranks_together_equal_the_oracle"
ALONE, EMBEDDINGS = "test_rows_do_not_depend_on_the_batch", "test_embeddings_are_what_enters_the_first_layer"
UNKNOWN_WEIGHTS = "test_some_weights_of_another_model_are_refused"
STAGES, SOME_WEIGHTS = "test_stages_together_equal_the_oracle", "test_some_weights_are_loaded_and_the_others_kept"
SIZE, LAYERS = "test_the_size_is_that_of_the_model", "test_states_between_the_layers_are_given"
ADAPTERS = "test_adapters_equal_merged_weights"
LEFT_OUT = "test_layers_are_left_out_as_asked"
FAULTS = [
    Fault("ties what is not tied", ties(True), f"{LOGITS}[untied-whole]"),
    Fault("does not tie what is tied", ties(False), f"{LOGITS}[tied-whole]"),
    Fault("counts positions from 0 in each chunk", computing(without_positions), f"{LOGITS}[untied-in chunks]"),
    Fault("lets requests look at each other", computing(with_a_look_aside), "test_requests_of_a_batch_do_not_meet"),
    Fault("ignores embeddings", computing(ignores_embeddings), "test_embeddings_take_the_place_of_token_ids"),
    Fault("builds every layer in each stage", building(all_layers), STAGES),
    Fault("leaves out a layer of a stage", building(one_layer_less), STAGES),
    Fault("declares stages falsely", TakesStages, STAGES),
    Fault("builds stages and does not say so", TakesNoStages, STAGES),
    Fault("resets weights that are not given", building(after=resets_the_others), SOME_WEIGHTS),
    Fault(
        "takes weights of any name",
        building(after=takes_unknown_names),
        "test_some_weights_of_another_model_are_refused",
    ),
    Fault("ignores adapters", computing(ignores_adapters), "test_inputs_that_it_cannot_take_are_refused"),
    Fault("declares adapters falsely", TakesAdapters, ADAPTERS),
    Fault("adds one adapter to all requests", computing(takes_the_first_slot), ADAPTERS),
    Fault("adds adapters to the attention alone", building(without_adapters_in_mlps), ADAPTERS),
    Fault("sums no adapters over ranks", over(OwnSums), f"{ADAPTERS}[untied-2]"),
    Fault("leaves adapters bound", building(after=leaves_rows_bound), "test_adapters_end_with_their_pass"),
    Fault("says another hidden size", sized(hidden_size=lambda size: size // 2), SIZE),
    Fault("says another vocabulary", sized(vocab_size=lambda size: size - 1), SIZE),
    Fault("says a layer too many", sized(num_layers=lambda count: count + 1), SIZE),
    Fault("does not sum over ranks", over(OwnSums), RANKS),
    Fault("turns the ranks' vocabularies round", over(TurnedRound), RANKS),
    Fault("gives each rank the first share", over(OneRank), RANKS),
    Fault("declares batch invariance falsely", computing(with_bits_of_the_batch), ALONE),
    Fault("declares hidden_layers falsely", GivesLayers, LAYERS),
    Fault("gives the states behind a layer", computing(next_layer), LAYERS),
    Fault("leaves out no layers", computing(leaves_out_none), LEFT_OUT),
    Fault("doubles the longest sequence", sized(max_model_len=lambda count: 2 * count), SIZE),
    Fault("counts parameters twice", sized(num_parameters=lambda count: 2 * count), SIZE),
    Fault("counts a head too many", sized(num_kv_heads=lambda count: count + 1), SIZE),
    Fault(
        "scales what drafters embed",
        building(after=scales_embeddings),
        "test_embeddings_are_what_enters_the_first_layer",
    ),
    Fault("computes its layers twice", computing(twice), "test_layers_are_computed_once_and_in_order"),
    Fault("declares quantization falsely", TakesQuantization, "test_quantization_is_taken_as_declared"),
    Fault("takes quantization and does not say so", TakesNoQuantization, "test_quantization_is_taken_as_declared"),
    Fault("declares operators falsely", TakesOperators, "test_operators_are_taken_as_declared"),
    Fault("has operators of its own", building(own_operators), "test_operators_are_taken_as_declared"),
    Fault("loads without a tensor", building(after=swallows_errors), "test_a_missing_tensor_is_refused"),
    Fault("refuses nothing", ServesAnything, "test_check_takes_what_is_served"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_finds_a_family_that(fault: Fault) -> None:
    check_fault(fault, ModelFamilySuite, plugin=fault.plugin)


def test_layers_that_could_be_left_out_are_a_hint() -> None:
    capabilities = replace(LlamaFamily.capabilities, skips_layers=False)
    modest = type("Modest", (LlamaFamily,), {"capabilities": capabilities})
    results = run_class(ModelFamilySuite, {"plugin": modest}, f"{LEFT_OUT}[tied]")
    assert [result.undeclared for result in results] == [Capability("skips_layers")]
