"""What the rules ask of the rooms above: a model's layers, and a checkpoint's tokenizer. Neither reads a weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from dovetail.contracts.layer_plan import LayerPlan
from dovetail.contracts.model import ModelFamily
from dovetail.contracts.weights import TokenizerFiles


class Vocabulary(Protocol):
    """Of a tokenizer, what tells two of them apart."""

    def id_to_token(self, token_id: int) -> str | None:
        """The token's text as the vocabulary has it; None for an id that it does not have."""


class Inspector(Protocol):
    """Looks into a checkpoint with building blocks and tokenizers that the config itself does not know."""

    def plan_layers(self, family: ModelFamily, hf_config: Mapping[str, Any], tensor_parallel: int) -> LayerPlan:
        """The layers of the first rank. Raises `ModelError` as `ModelFamily.create`."""

    def load_vocabulary(
        self, files: TokenizerFiles | None, mode: str, override_directory: str | None = None
    ) -> Vocabulary | None:
        """The tokenizer of a checkpoint; None where `mode` is "none". Raises `ModelError` where it cannot be read."""
