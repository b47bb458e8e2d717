"""EAGLE: a small head guesses from the target's own states, as chains or as trees that follow its confidence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from dovetail.contracts.attention import AttentionModule
from dovetail.contracts.draft_target import CallsTarget, CopiesTarget, NamesWeights, TargetParts, UpdatesWeights
from dovetail.contracts.errors import ModelError
from dovetail.contracts.kv import KVSpec
from dovetail.contracts.plugin import Environment
from dovetail.contracts.speculation import (
    BuildsLayers,
    DraftBatch,
    LayerSetup,
    ReadsHiddenLayers,
    SpeculationNeed,
)
from dovetail.nn.hf_config import head_size, num_kv_heads
from dovetail.nn.loading import expected_shapes, load_weights
from dovetail.spec_decode.draft_vocabulary import load_draft_vocabulary
from dovetail.spec_decode.eagle.files import HeadConfig, read_config, tensor_names
from dovetail.spec_decode.eagle.head import EagleHead, load_head
from dovetail.spec_decode.state_drafts import StateDrafter, StateDraftOptions


class EagleOptions(StateDraftOptions):
    """Options of `eagle`: the head, and the shape of its drafts."""

    path: Path
    """Folder with config.json and the head's weights. Dovetail's repository has one for the default model,
    examples/train_drafters/heads/eagle, and scripts that train others in examples/train_drafters."""
    quantization: str | dict[str, Any] | None = "auto"
    """How the head's weights are held: a quantization method, null for full precision, or `auto`, which rounds to 8
    bits where that is fast."""


class EagleDrafter(
    BuildsLayers, ReadsHiddenLayers, StateDrafter, UpdatesWeights, NamesWeights, CopiesTarget, CallsTarget
):
    """Runs a head over the pairs of tokens and states."""

    contract: ClassVar[tuple[int, int]] = (1, 4)
    Options = EagleOptions
    options: EagleOptions

    @classmethod
    def quantization(cls, options: EagleOptions) -> str | Mapping[str, Any] | None:
        return options.quantization

    @classmethod
    def check(cls, need: SpeculationNeed, options: EagleOptions, environment: Environment) -> list[str]:
        """Refuses a head that was made for another target."""
        directory = options.path
        try:
            head, names = read_config(directory), tensor_names(directory)
        except ModelError as error:
            return [f"{error}."]
        reasons = []
        if head.target_hidden_size != need.hidden_size:
            reasons.append(
                f"the head in {directory} reads states of {head.target_hidden_size} numbers, the target's have "
                f"{need.hidden_size}: it was trained for another model."
            )
        if head.vocab_size != need.vocab_size:
            reasons.append(
                f"the head in {directory} is for a vocabulary of {head.vocab_size} tokens, the target's has "
                f"{need.vocab_size}: it was trained for another model."
            )
        shared = [name for name in ("embed_tokens", "lm_head") if f"{name}.weight" not in names]
        if shared and head.hidden_size != head.target_hidden_size:
            reasons.append(
                f"the head in {directory} has states of {head.hidden_size} numbers and lacks {' and '.join(shared)}; "
                f"the target's are for {head.target_hidden_size}."
            )
        if "lm_head.weight" not in names and head.draft_vocab_size != head.vocab_size:
            reasons.append(f"the head in {directory} has a vocabulary of its own, but no lm_head.weight for it.")
        return reasons

    @classmethod
    def target_parts(cls, options: EagleOptions, need: SpeculationNeed) -> TargetParts:
        """Those that the head's file lacks."""
        names = tensor_names(options.path)
        return TargetParts(
            embedding="embed_tokens.weight" not in names,
            output="lm_head.weight" not in names,
        )

    @classmethod
    def caches(cls, options: EagleOptions, need: SpeculationNeed) -> Sequence[KVSpec]:
        """One entry per layer of the head."""
        head = read_config(options.path)
        return [
            KVSpec(num_kv_heads=num_kv_heads(head.layer), head_size=head_size(head.layer), dtype=need.kv_dtype)
        ] * head.num_layers

    @classmethod
    def hidden_layers(cls, options: EagleOptions, need: SpeculationNeed) -> Sequence[int]:
        """EAGLE-3's low, middle and high layers."""
        return _with_layers(read_config(options.path), need.num_layers).hidden_layers or ()

    def __init__(self, options: EagleOptions, setup: LayerSetup):
        super().__init__(options, setup)
        context = setup.create_context()
        directory = options.path
        self._head: EagleHead = load_head(context, _with_layers(read_config(directory), setup.num_layers), directory)
        self._layers = context.attention_layers
        self._reads_layers = self._head.config.version == 3
        self._vocabulary = load_draft_vocabulary(directory, setup) if self._head.lm_head is None else None
        own = self._head.target_ids if self._vocabulary is None else self._vocabulary.token_ids
        self.target_ids = own

    def expected_weights(self) -> Mapping[str, tuple[int, ...]]:
        """Those of the head's layers. Its map of tokens (`d2t`) stays as it is."""
        return expected_shapes(self._head)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], partial: bool = False) -> None:
        load_weights(self._head, weights, partial=partial)

    def own_weights(self) -> Iterable[torch.Tensor | torch.nn.Module]:
        """The head, and the unembedding of a draft vocabulary."""
        yield self._head
        if self._vocabulary is not None:
            yield from self._vocabulary.tensors()

    def target_changed(self) -> None:
        """A draft vocabulary has rows of the target's unembedding."""
        if self._vocabulary is not None:
            self._vocabulary.read_target(self.setup)

    def attention_layers(self) -> Sequence[AttentionModule]:
        return self._layers

    def states(self, batch: DraftBatch) -> torch.Tensor:
        states = batch.layer_states if self._reads_layers else batch.hidden_states
        assert states is not None
        return states

    def first_features(self, states: torch.Tensor) -> torch.Tensor:
        return self._head.first_features(states)

    def run(
        self, tokens: torch.Tensor, features: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head = self._head
        embeds = self.setup.embed(tokens) if head.embed_tokens is None else head.embed_tokens(tokens)
        result: tuple[torch.Tensor, torch.Tensor] = head(embeds, features, positions)
        return result

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        lm_head = self._head.lm_head
        if self._vocabulary is not None:
            return self._vocabulary.logits(outputs)
        logits: torch.Tensor = self.setup.compute_logits(outputs) if lm_head is None else lm_head(outputs)
        return logits


def _with_layers(head: HeadConfig, num_layers: int) -> HeadConfig:
    """A head of EAGLE-3 with the target's layers that it reads: those of its config, or the usual ones."""
    if head.version != 3 or head.hidden_layers is not None:
        return head
    return replace(head, hidden_layers=(min(2, num_layers), num_layers // 2, max(0, num_layers - 3)))
