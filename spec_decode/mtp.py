"""Multi-token prediction: the module that a model was trained with guesses the token after the next one.

DeepSeek-AI 2024, "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 2.2. The checkpoint holds the module behind
the main model's layers; its family builds it (`PredictsFurther`), and the host loads it as the drafter's own model. As
engines do, one module makes a whole draft: from its second token on it reads its own state in the place of the main
model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field

from dovetail.contracts.attention import AttentionModule
from dovetail.contracts.errors import ModelError
from dovetail.contracts.kv import KVSpec
from dovetail.contracts.model import FURTHER_MODULE, ModelInputs, PredictsFurther
from dovetail.contracts.plugin import Environment
from dovetail.contracts.speculation import DraftBatch, LayerSetup, LoadsModel, SpeculationNeed
from dovetail.spec_decode.state_drafts import StateDrafter, StateDraftOptions


class MTPOptions(StateDraftOptions):
    """The checkpoint, with keys of the config's section `model`, and the shape of drafts."""

    path: str = Field(min_length=1)
    """The target's own checkpoint, as in `model.path`: the module lies in it."""
    revision: str | None = None
    dtype: str = "auto"
    quantization: str | dict[str, Any] | None = "auto"
    family: str | dict[str, Any] = "auto"
    weight_format: str | dict[str, Any] = "auto"
    source: str | dict[str, Any] = "auto"
    module: int = Field(default=0, ge=0)
    """Which of the checkpoint's modules drafts; the first one was trained to follow the main model."""


class MTPDrafter(LoadsModel, StateDrafter):
    """Runs the module over the pairs of tokens and states."""

    contract: ClassVar[tuple[int, int]] = (1, 1)
    Options = MTPOptions
    options: MTPOptions

    @classmethod
    def model_section(cls, options: MTPOptions) -> Mapping[str, Any]:
        """Returns the options of the checkpoint, asking for its module."""
        # Not those of a class that derives from these options.
        keys = MTPOptions.model_fields.keys() - StateDraftOptions.model_fields.keys() - {"module"}
        return options.model_dump(include=keys) | {"hf_overrides": {FURTHER_MODULE: options.module}}

    @classmethod
    def check(cls, need: SpeculationNeed, options: MTPOptions, environment: Environment) -> list[str]:
        """Refuses checkpoints of other models than the target."""
        if need.model is None:
            return ["the host found no model."]
        size = need.model.size
        if (size.hidden_size, size.vocab_size) != (need.hidden_size, need.vocab_size):
            return [
                f"{options.path!r} has states of {size.hidden_size} numbers and {size.vocab_size} tokens, the target "
                f"{need.hidden_size} and {need.vocab_size}: give the target's own checkpoint."
            ]
        if size.num_layers != 1:
            return [
                f"{options.path!r} gives no module {options.module} for multi-token prediction, but a model of "
                f"{size.num_layers} layers: choose another drafter, or name a family that builds such modules with "
                "the key family, which then says what is wrong."
            ]
        return []

    @classmethod
    def caches(cls, options: MTPOptions, need: SpeculationNeed) -> Sequence[KVSpec]:
        """Returns what the module's layer caches."""
        assert need.model is not None
        return [need.model.size.cache(need.kv_dtype)]

    def __init__(self, options: MTPOptions, setup: LayerSetup):
        super().__init__(options, setup)
        assert setup.model is not None
        self._module = setup.model.module
        if not isinstance(self._module, PredictsFurther):
            raise ModelError(
                f"the family of {options.path!r} builds no modules for multi-token prediction: choose another drafter"
            )
        self._combine = self._module.combine

    def attention_layers(self) -> Sequence[AttentionModule]:
        assert self.setup.model is not None
        return self.setup.model.layers

    def states(self, batch: DraftBatch) -> torch.Tensor:
        assert batch.hidden_states is not None
        return batch.hidden_states

    def first_features(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def run(
        self, tokens: torch.Tensor, features: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        combined = self._combine(self._module.embed(tokens), features)
        outputs = self._module.forward(ModelInputs(embeddings=combined, positions=positions, layers=(1,)))
        assert outputs.layer_states is not None
        return outputs.layer_states, outputs.hidden

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        return self._module.compute_logits(outputs)
