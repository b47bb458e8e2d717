"""The base of causal language models: embedding, output layer, the stage's layers, and weight loading."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import ClassVar

import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import ModelContext, ModelInputs, ModelOutputs
from dovetail.nn.adapters import adapter_space
from dovetail.nn.embedding import LMHead, VocabEmbedding
from dovetail.nn.loading import NamedWeights, WeightRules, load_weights

MakeLayer = Callable[[str, int], torch.nn.Module]
"""Makes a layer from its dotted name and its number in the model."""
MakeNorm = Callable[[str], torch.nn.Module]
"""Makes a norm from its dotted name."""


def check_inputs(
    inputs: ModelInputs,
    *,
    is_first_stage: bool = True,
    gives_hidden_layers: bool = False,
    skips_layers: bool = False,
    takes_adapters: bool = False,
    takes_token_types: bool = False,
) -> None:
    """Raises `ModelError` for inputs that a model with one axis of positions does not take, and for inputs of another
    stage."""
    if inputs.adapters is not None and not takes_adapters:
        raise ModelError("this model was made without ModelContext.adapters, so ModelInputs.adapters must be None")
    if inputs.token_types is not None and not takes_token_types:
        raise ModelError("this model's tokens have no types, so ModelInputs.token_types must be None")
    if inputs.positions.dim() != 1:
        raise ModelError(
            f"this model rotates by one axis, and positions are given for {inputs.positions.shape[0]}; "
            "ModelInputs.positions must be [T]"
        )
    if inputs.layers and not gives_hidden_layers:
        raise ModelError(
            "this model does not give states between its layers: its family does not declare hidden_layers"
        )
    if inputs.skipped_layers and not skips_layers:
        raise ModelError("this model leaves out no layers: its family does not declare skips_layers")
    if inputs.skipped_layers and inputs.layers:
        raise ModelError("a pass that leaves layers out gives no states between them")
    if not is_first_stage and inputs.stage_input is None:
        raise ModelError("this stage of the model needs ModelInputs.stage_input, the hidden states of the stage before")
    if is_first_stage and (inputs.input_ids is None) == (inputs.embeddings is None):
        raise ModelError("the first stage of a model takes either ModelInputs.input_ids or ModelInputs.embeddings")


def check_whole(context: ModelContext, family: str) -> None:
    """Raises `ModelError` for a context of one stage of several: for families without the capability `stages`."""
    if not (context.is_first_stage and context.is_last_stage):
        raise ModelError(f"{family} builds whole models only, so that their layers cannot be divided among stages")


class StagedCausalLM(torch.nn.Module, ABC):
    """A causal language model, or one stage of it: a `CausalLM` whose subclasses implement `run_layers`.

    Its parts are called "model.embed_tokens", "model.layers.N", "model.norm" and "lm_head"; `rules` maps a checkpoint's
    names to these. The first stage has the embedding, the last one the norm and the output layer; with a tied output
    layer the last stage has the embedding's table as well.
    """

    gives_hidden_layers: ClassVar[bool] = False
    """Whether `run_layers` returns states between layers."""
    skips_layers: ClassVar[bool] = False
    """Whether `run_other_layers` is implemented."""

    def __init__(
        self,
        context: ModelContext,
        *,
        vocab_size: int,
        hidden_size: int,
        num_layers: int,
        make_layer: MakeLayer,
        make_norm: MakeNorm,
        is_tied: bool,
        head_bias: bool = False,
        rules: WeightRules | None = None,
    ):
        super().__init__()
        held, is_last = context.held_layers(num_layers), context.is_last_stage
        has_table = context.is_first_stage or (is_last and is_tied)
        table = VocabEmbedding(context, "model.embed_tokens", vocab_size, hidden_size) if has_table else None
        self.embed_tokens = table
        self.layers = torch.nn.ModuleList(make_layer(f"model.layers.{index}", index) for index in held)
        self.norm = make_norm("model.norm") if is_last else None
        tied = table if is_tied else None
        self.lm_head = LMHead(context, "lm_head", vocab_size, hidden_size, tied, head_bias) if is_last else None
        self.held_layers = held
        """Numbers of `layers` in the model."""
        self.num_layers = num_layers
        """Of the whole model."""
        self._is_first_stage = context.is_first_stage
        rules = rules or WeightRules()
        foreign = _foreign_patterns(context, held, num_layers, has_table=has_table)
        names = {"lm_head.weight": "model.embed_tokens.weight"} if is_tied else {}
        self._rules = replace(rules, tied=names, ignored=(*rules.ignored, *foreign))
        self._adapters = adapter_space(context)
        if self._adapters is not None:
            self._adapters.rules = self._rules

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings [T, hidden_size] of int64 [T]. Raises `ModelError` but on the first stage."""
        if self.embed_tokens is None or not self._is_first_stage:
            raise ModelError("only the first stage of a model embeds tokens")
        x: torch.Tensor = self.embed_tokens(input_ids)
        return x

    def forward(self, inputs: ModelInputs) -> ModelOutputs:
        """Runs the tokens of a step through the layers of this stage (`CausalLM.forward`)."""
        check_inputs(
            inputs,
            is_first_stage=self._is_first_stage,
            gives_hidden_layers=self.gives_hidden_layers,
            skips_layers=self.skips_layers,
            takes_adapters=self._adapters is not None,
        )
        if self._adapters is None or inputs.adapters is None:
            return self._run_stage(inputs)
        with self._adapters.bound(inputs.adapters):
            return self._run_stage(inputs)

    def _run_stage(self, inputs: ModelInputs) -> ModelOutputs:
        if inputs.skipped_layers:
            hidden = self.run_other_layers(self._entering(inputs), inputs.positions, inputs.skipped_layers)
            return ModelOutputs(hidden=hidden)
        hidden, states = self.run_layers(self._entering(inputs), inputs.positions, inputs.layers)
        return ModelOutputs(hidden=hidden, layer_states=states)

    def _entering(self, inputs: ModelInputs) -> torch.Tensor:
        given = inputs.embeddings if self._is_first_stage else inputs.stage_input
        if given is not None:
            return given
        assert inputs.input_ids is not None  # check_inputs saw to it
        return self.embed(inputs.input_ids)

    @abstractmethod
    def run_layers(
        self, x: torch.Tensor, positions: torch.Tensor, wanted: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs x [T, hidden_size], which may be overwritten, at positions int64 [T] through the layers of this stage,
        and through the norm on the last one. Also returns `ModelOutputs.layer_states` of the layers `wanted`, None for
        none."""

    def run_other_layers(self, x: torch.Tensor, positions: torch.Tensor, skipped: Set[int]) -> torch.Tensor:
        """As `run_layers`, without the layers `skipped`. Implemented by subclasses that say `skips_layers`."""
        raise ModelError("this model leaves out no layers")

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits [R, vocab_size] of [R, hidden_size]. Raises `ModelError` but on the last stage."""
        if self.lm_head is None:
            raise ModelError("only the last stage of a model computes logits")
        logits: torch.Tensor = self.lm_head(hidden)
        return logits

    def load_weights(self, weights: NamedWeights, partial: bool = False) -> None:
        """Copies a checkpoint's tensors into the module, by `rules` (`dovetail.nn.load_weights`)."""
        load_weights(self, weights, self._rules, partial=partial)


def _foreign_patterns(context: ModelContext, held: range, num_layers: int, *, has_table: bool) -> list[str]:
    """Names of tensors that other stages hold."""
    patterns = []
    if others := [str(index) for index in range(num_layers) if index not in held]:
        patterns.append(rf"model\.layers\.(?:{'|'.join(others)})\..*")
    if not has_table:
        patterns.append(r"model\.embed_tokens\..*")
    if not context.is_first_stage:
        patterns.append(r"model\.embed_norm\..*")
    if not context.is_last_stage:
        patterns += [r"model\.norm\..*", r"lm_head\..*"]
    return patterns
