"""Model family: from a config to a module that calls the attention layer.

A family builds its module from `dovetail.nn` (linear layers that know quantization and sharding, norms, rotary
embedding, the attention layer) and so gets tensor parallelism, paged attention and quantization without
knowing them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dovetail.contracts.plugin import Plugin, PluginOptions

if TYPE_CHECKING:
    import torch

    from dovetail.nn.context import ModelContext


@dataclass(frozen=True)
class ModelNeed:
    """What is asked of a family; the argument of `check`."""

    config: Mapping[str, Any]
    """The keys of Hugging Face's config.json."""
    tensor_parallel: int
    device_type: str
    dtype: str


class CausalLM(Protocol):
    """What a family builds: a torch module, created on the context's device and dtype, without weights."""

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [N] -> [N, hidden_size], as they enter the first layer; drafters share it."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 [T] token ids and positions of the step's query tokens, flat over requests -> the last hidden states
        [T, hidden_size], final norm applied. Calls each attention layer once, in order of layer_id."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden_size] -> [N, vocab_size], on every rank the whole vocabulary."""

    def load_weights(self, weights: Any) -> None:
        """Takes an iterable of (name, tensor), names as in the Hugging Face checkpoint. Under a quantization method
        tensors of the formats that it `holds` are `PackedTensor`s (`dovetail.nn.load_weights` knows them). Raises
        `ModelError` that lists tensors that are missing or that nobody wants."""


class LayeredCausalLM(CausalLM, Protocol):
    """What a family with `gives_hidden_layers` builds. Since 1.2."""

    def forward_with_layers(
        self, input_ids: torch.Tensor, positions: torch.Tensor, layers: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`, and besides [T, len(layers) * hidden_size]: for each of `layers`, which ascend, the residual
        stream that enters that layer (number of layers: that enters the final norm), side by side."""


@dataclass(frozen=True)
class ModelSize:
    """Estimates made from the config alone."""

    num_parameters: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_model_len: int
    """Longest sequence that the config declares (max_position_embeddings, RoPE scaling included)."""
    hidden_size: int = 0
    """Numbers in a hidden state, which drafters are told; 0: config.json's own `hidden_size`. Since 1.4."""


class ModelFamily(Plugin):
    """One group of architectures that share a module."""

    architectures: ClassVar[Sequence[str]] = ()
    """Values of config.json's "architectures" that the family builds. Empty: decided by `check` alone."""

    takes_quantization: ClassVar[bool] = True
    """Whether the linear layers come from `dovetail.nn`, so that a quantization method can hold their weights."""

    takes_operators: ClassVar[bool] = True
    """Whether norms, activations and rotations come from `dovetail.nn`, so that a set of operators computes them."""

    batch_invariant: ClassVar[bool] = False
    """Whether rows meet only in the attention layers: all else is done row by row, or by building blocks of
    `dovetail.nn`, which see to it that a row's result bits do not depend on the rows beside it where
    `ModelContext.batch_invariant` asks for that (`reproducibility: strict`). Since 1.2."""

    gives_hidden_layers: ClassVar[bool] = False
    """Whether its modules are `LayeredCausalLM`s, so that drafters can look between the layers. Since 1.2."""

    def __init__(self, options: PluginOptions):
        self.options = options

    @abstractmethod
    def size(self, config: Mapping[str, Any]) -> ModelSize:
        """Size estimates, for explanations and memory planning. Raises `ModelError` for a config that lacks keys."""

    @abstractmethod
    def create(self, config: Mapping[str, Any], context: ModelContext) -> CausalLM:
        """Builds the module. Raises `ModelError` for values that it cannot serve (head counts that do not divide by
        tensor_parallel, an unknown RoPE type)."""
