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

    from dovetail.contracts.attention import AttentionModule
    from dovetail.contracts.operators import Operators
    from dovetail.contracts.quantization import LinearKernel, LinearShape, QuantizationMethod


@dataclass(frozen=True)
class ModelNeed:
    """What is asked of a family; the argument of `check`."""

    config: Mapping[str, Any]
    """The keys of Hugging Face's config.json."""
    tensor_parallel: int
    device_type: str
    dtype: str


class Communicator(Protocol):
    """Collectives over one tensor-parallel group. Every rank calls the same ones in the same order."""

    @property
    def rank(self) -> int:
        """This process's place in the group, 0 <= rank < size."""

    @property
    def size(self) -> int:
        """Processes in the group."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums `tensor` over all ranks, in place, and returns it."""

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Every rank's tensor (all of one shape), side by side along `dim` in rank order."""

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Overwrites `tensor` with that of rank `src`, in place, and returns it."""


class ModelContext(Protocol):
    """Where and how one module is built: device, dtype, ranks, quantization.

    One context serves one module. The building blocks of `dovetail.nn` take it as first argument, and their attention
    layers register themselves in it. The host makes it; `dovetail.nn.BuildContext` is one that anybody can make.
    """

    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    """Longest sequence that will be computed, in tokens; sizes the tables of position embeddings."""
    kv_dtype: str
    """dtype of cached keys and values, in torch's spelling."""
    communicator: Communicator
    quantization: QuantizationMethod | None
    batch_invariant: bool
    """Whether a row's result bits must not depend on the rows with which it is computed; linear layers see to it."""
    operators: Operators
    """What norms, gated activations and rotations are computed with."""
    attention_layers: list[AttentionModule]
    """Every attention layer of the module, in the order of creation, which is the order of `layer_id`."""

    @property
    def tp_rank(self) -> int:
        """This process's rank in the tensor-parallel group."""

    @property
    def tp_size(self) -> int:
        """Ranks that share the model."""

    def divide(self, total: int, what: str) -> int:
        """`total` / `tp_size`. Raises `ModelError` where that leaves a remainder."""

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An uninitialised tensor on the context's device, in its dtype unless `dtype` is given."""

    def create_kernel(self, shape: LinearShape) -> LinearKernel:
        """The quantization method's kernel for a linear layer, or plain torch where it has none for it."""

    def create_embedding_kernel(self, shape: LinearShape) -> LinearKernel | None:
        """The quantization method's kernel for a table of token embeddings; None: the table stays a plain tensor."""

    def create_plain_kernel(self, shape: LinearShape) -> LinearKernel:
        """A kernel in full precision, whatever the quantization method says."""


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
    """What a family with `gives_hidden_layers` builds."""

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
    """Numbers in a hidden state, which drafters are told; 0: config.json's own `hidden_size`."""


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
    `ModelContext.batch_invariant` asks for that (`reproducibility: strict`)."""

    gives_hidden_layers: ClassVar[bool] = False
    """Whether its modules are `LayeredCausalLM`s, so that drafters can look between the layers."""

    def __init__(self, options: PluginOptions):
        self.options = options

    @abstractmethod
    def size(self, config: Mapping[str, Any]) -> ModelSize:
        """Size estimates, for explanations and memory planning. Raises `ModelError` for a config that lacks keys."""

    @abstractmethod
    def create(self, config: Mapping[str, Any], context: ModelContext) -> CausalLM:
        """Builds the module. Raises `ModelError` for values that it cannot serve (head counts that do not divide by
        tensor_parallel, an unknown RoPE type)."""
