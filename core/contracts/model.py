"""Model family: from a config to a module that calls the attention layer.

A family builds its module from `dovetail.nn` (linear layers that know quantization and sharding, norms, rotary
embedding, the attention layer) and so gets tensor parallelism, paged attention and quantization without
knowing them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dovetail.contracts.needs import at_most, compared, flag, informs
from dovetail.contracts.plugin import Plugin, PluginOptions

if TYPE_CHECKING:
    import torch

    from dovetail.contracts.attention import AttentionModule
    from dovetail.contracts.operators import Operators
    from dovetail.contracts.quantization import LinearKernel, LinearShape, LooksUpRows, QuantizationMethod
    from dovetail.contracts.weights import PackedTensor


@dataclass(frozen=True, kw_only=True)
class ModelCapabilities:
    """What a family can do."""

    tensor_parallel: int | None = 1
    """Most ranks that its models can be split over; None: any number that their sizes divide by."""
    quantization: bool = False
    """The linear layers come from `dovetail.nn`, so that a quantization method can hold their weights."""
    operators: bool = False
    """Norms, activations and rotations come from `dovetail.nn`, so that a set of operators computes them."""
    batch_invariant: bool = False
    """Rows meet only in the attention layers: all else is done row by row, or by building blocks of `dovetail.nn`,
    which see to it that a row's result bits do not depend on the rows of the same batch where
    `ModelContext.batch_invariant` asks for that (`reproducibility: strict`)."""
    hidden_layers: bool = False
    """Its modules give the states that `ModelInputs.layers` asks for, so that drafters can look between the layers."""
    stages: bool = False
    """`create` builds the layers that `ModelContext.held_layers` names and no others, so that the layers can be divided
    among pipeline stages. Otherwise it refuses a context that is not both first and last stage."""


def _divided(has_stages: bool, asked: int) -> int | None:
    return asked if asked > 1 and not has_stages else None


@dataclass(frozen=True, kw_only=True)
class ModelNeed:
    """What is asked of a family; the argument of `check`."""

    config: Mapping[str, Any] = field(metadata=informs("`architectures` and `check` judge it"))
    """The keys of Hugging Face's config.json."""
    tensor_parallel: int = field(
        metadata=compared(
            "tensor_parallel",
            at_most,
            "{name} builds models for up to {has} tensor-parallel rank: set executor.tensor_parallel to {has}.",
        )
    )
    device_type: str = field(metadata=informs("a family computes with torch, on the device that it is handed"))
    dtype: str = field(metadata=informs("a family computes with torch, in the dtype that it is handed"))
    pipeline_parallel: int = field(
        default=1,
        metadata=compared(
            "stages",
            _divided,
            "{name} builds whole models only, not {asked} stages: set executor.pipeline_parallel to 1.",
        ),
    )
    """Stages that share the layers."""
    batch_invariant: bool = field(
        default=False,
        metadata=compared(
            "batch_invariant",
            flag,
            "{name} does not keep its rows apart, which reproducibility: strict needs; leave reproducibility at "
            "default.",
        ),
    )
    """Whether a row's result bits must not depend on the rows of the same batch (`reproducibility: strict`)."""


class Communicator(Protocol):
    """Collectives over one tensor-parallel group. Every rank calls the same ones in the same order."""

    @property
    def rank(self) -> int:
        """This process's rank in the group, 0 <= rank < size."""

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
    """Every attention layer of the module, in the order of creation, which is the order of `layer_id`: numbers within
    the module, from 0 on also where it holds only some layers of the model."""
    is_first_stage: bool
    """Whether the module has what comes before the layers: it takes token ids or embeddings and answers `embed`."""
    is_last_stage: bool
    """Whether the module has what follows the layers: the final norm, and the output layer of `compute_logits`."""

    def held_layers(self, num_layers: int) -> range:
        """Which of the model's `num_layers` decoder layers this module holds, numbered from 0 as in the checkpoint:
        all, unless pipeline stages share them. Raises `ModelError` where the stages were cut for more layers."""

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

    def create_embedding_kernel(self, shape: LinearShape) -> LooksUpRows | None:
        """The quantization method's kernel for a table of token embeddings; None: the table stays a plain tensor."""

    def create_plain_kernel(self, shape: LinearShape) -> LinearKernel:
        """A kernel in full precision, whatever the quantization method says."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelInputs:
    """The query tokens of one step, flat over requests: T tokens. Tensors lie on the context's device.

    The first stage is given `input_ids` or `embeddings`, never both. Later stages are given `stage_input`, and
    `input_ids` as well where the host has them.
    """

    positions: torch.Tensor
    """int64 [T]: position of each token in its sequence. int64 [axes, T] for rotations over several axes (Qwen2-VL,
    section 2.1: time, height, width); a family that knows one axis refuses it with `ModelError`."""
    input_ids: torch.Tensor | None = None
    """int64 [T]."""
    embeddings: torch.Tensor | None = None
    """[T, hidden_size], as `CausalLM.embed` gives them, for tokens that are not (all) text. Given up: the model may
    write into them."""
    stage_input: torch.Tensor | None = None
    """[T, hidden_size]: `ModelOutputs.hidden` of the stage before. Given up likewise."""
    layers: tuple[int, ...] = ()
    """Ascending numbers of decoder layers: the states that enter them are wanted as `ModelOutputs.layer_states`. The
    number of layers itself means what enters the final norm. Asked only of families with the capability
    `hidden_layers`; others refuse with `ModelError`."""
    adapters: None = None
    """Reserved for the low-rank adapters of each token. A family refuses anything but None with `ModelError`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelOutputs:
    """What one call into a model gives."""

    hidden: torch.Tensor
    """[T, hidden_size]: of the last stage with the final norm applied, of others the residual stream that leaves their
    last layer."""
    layer_states: torch.Tensor | None = None
    """[T, n * hidden_size], the n states that `ModelInputs.layers` asks for, one after the other along the last
    dimension; None where none are asked for. A stage gives those that enter its own layers, the last one also that of
    the final norm."""


class CausalLM(Protocol):
    """What a family builds: a torch module, created on the context's device and dtype, without weights."""

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [N] -> [N, hidden_size], as they enter the first layer; drafters share it. On the first stage only."""

    def forward(self, inputs: ModelInputs) -> ModelOutputs:
        """Computes the step's query tokens. Calls each attention layer of the module once, in order of layer_id. Raises
        `ModelError` for inputs that the family does not take."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden_size] -> [N, vocab_size], on every rank the whole vocabulary. On the last stage only."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor | PackedTensor]], partial: bool = False) -> None:
        """Takes (name, tensor) pairs, names as in the Hugging Face checkpoint, of the whole model: each rank keeps its
        share, each stage its layers. Under a quantization method tensors of its `packed_formats` are `PackedTensor`s
        (`dovetail.nn.load_weights` knows them).

        Raises `ModelError` that lists tensors that are missing or that nobody wants.

        `partial`: any of the checkpoint's tensors, into a module that was loaded before. Weights that are not given
        keep their values, parts of fused layers too, and those given go into the memory that the old ones had, so that
        captured graphs stay valid. Raises `ModelError` that lists names that the model does not have, and for layers
        whose kernels cannot be loaded again. After an error all weights must be loaded anew.
        """


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """What a config says of the whole model, ranks and stages together. The host compares it with the module that
    `create` builds, and refuses the family where they differ."""

    num_parameters: int
    num_layers: int
    """Attention layers."""
    num_kv_heads: int
    """Key-value heads of the first attention layer."""
    head_size: int
    """Of the first attention layer."""
    hidden_size: int
    """Numbers in a hidden state: of `CausalLM.embed`, and of what `compute_logits` takes."""
    vocab_size: int
    """Logits of a token."""
    max_model_len: int
    """Longest sequence that the config declares (max_position_embeddings, RoPE scaling included)."""


class ModelFamily(Plugin):
    """One group of architectures that share a module."""

    architectures: ClassVar[Sequence[str]] = ()
    """Values of config.json's "architectures" that the family builds. Empty: decided by `check` alone."""

    capabilities: ClassVar[ModelCapabilities] = ModelCapabilities()

    def __init__(self, options: PluginOptions):
        self.options = options

    @abstractmethod
    def size(self, config: Mapping[str, Any]) -> ModelSize:
        """Sizes of the module that `create` builds, from the config alone; the host refuses a family whose sizes
        differ. Raises `ModelError` for a config that lacks keys."""

    @abstractmethod
    def create(self, config: Mapping[str, Any], context: ModelContext) -> CausalLM:
        """Builds the module. Raises `ModelError` for values that it cannot serve (head counts that do not divide by
        tensor_parallel, an unknown RoPE type), and for stages without the capability `stages`."""
