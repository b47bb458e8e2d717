"""Model family: from a config to a module that calls the attention layer.

A family builds its module from `dovetail.nn` (linear layers with quantization and sharding, norms, rotary embedding,
the attention layer), and so gets tensor parallelism, paged attention and quantization without code of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dovetail.contracts.attention import TransientSpec
from dovetail.contracts.kv import KVSpec, LatentSpec
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
    """Most tensor-parallel ranks that the models can be split over; None: any number that divides their sizes."""
    quantization: bool = False
    """The linear layers come from `dovetail.nn`, so that a quantization method can hold their weights."""
    operators: bool = False
    """Norms, activations and rotations come from `dovetail.nn`, so that a set of operators computes them."""
    batch_invariant: bool = False
    """Rows affect each other only in attention layers. Everything else is computed row by row, or by building blocks of
    `dovetail.nn`, which keep a row's result bits independent of the other rows of the batch where
    `ModelContext.batch_invariant` asks for that (`reproducibility: strict`)."""
    hidden_layers: bool = False
    """The modules return the states that `ModelInputs.layers` asks for, so that drafters can read states between
    layers."""
    skips_layers: bool = False
    """The modules leave out the layers that `ModelInputs.skipped_layers` names, so that drafters can guess with the
    others (`RunsTarget`)."""
    graph_capture: bool = False
    """Forward passes can be captured in a graph: they launch the same operations for every step of as many tokens, and
    neither wait for the device nor read its memory. Modules that do so in some cases only are `dovetail.nn.MayWait`.
    Otherwise steps run eagerly."""
    adapters: bool = False
    """With `ModelContext.adapters` the modules take `ModelInputs.adapters`: every linear layer between embedding and
    output layer takes low-rank adapters, those of a mixture's experts aside, as the layers of `dovetail.nn` do in a
    `dovetail.nn.StagedCausalLM`."""
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
    """Number of pipeline stages that share the layers."""
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
    adapters: bool = field(
        default=False,
        metadata=compared(
            "adapters",
            flag,
            "{name} applies no adapters: set lora.enabled to false, and serve a model with the adapter merged into its "
            "weights; or choose a family that declares adapters.",
        ),
    )
    """Whether low-rank adapters will be applied to the tokens of requests (`lora.enabled`)."""


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
        """Returns the tensors of all ranks (of one shape), concatenated along `dim` in rank order."""

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Overwrites `tensor` with that of rank `src`, in place, and returns it."""


class AdapterRegistry(Protocol):
    """Where a module's linear layers register, so that adapters can be placed in them. The host makes it, a
    `dovetail.nn.AdapterSpace`, which is what the blocks of `dovetail.nn` take."""

    @property
    def max_loras(self) -> int:
        """Number of slots: adapters that the tokens of one step may have between them."""

    @property
    def max_rank(self) -> int:
        """Highest rank of an adapter."""


class ModelContext(Protocol):
    """How one module is built: device, dtype, ranks, quantization.

    One context serves one module. The building blocks of `dovetail.nn` take it as first argument, and their attention
    layers register themselves in it. The host makes it; plugins can make a `dovetail.nn.BuildContext`.
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
    """Whether a row's result bits must not depend on the other rows of the batch; linear layers ensure it."""
    operators: Operators
    """The operators that compute norms, gated activations and rotations."""
    attention_layers: list[AttentionModule]
    """Every attention layer of the module, in the order of creation, which is the order of `layer_id`: numbers within
    the module, from 0 on also where it holds only some layers of the model."""
    is_first_stage: bool
    """Whether the module has the embedding: it takes token ids or embeddings and serves `embed`."""
    is_last_stage: bool
    """Whether the module has the final norm and the output layer of `compute_logits`."""

    @property
    def adapters(self) -> AdapterRegistry | None:
        """Where linear layers register for low-rank adapters; None: the module gets none. Set only for families with
        the capability `adapters`."""

    def held_layers(self, num_layers: int) -> range:
        """Returns which of the model's `num_layers` decoder layers this module holds, numbered from 0 as in the
        checkpoint: all, unless pipeline stages share them. Raises `ModelError` where the stages were cut for more
        layers."""

    @property
    def tp_rank(self) -> int:
        """This process's rank in the tensor-parallel group."""

    @property
    def tp_size(self) -> int:
        """Number of ranks that share each layer."""

    def divide(self, total: int, what: str) -> int:
        """Returns `total` / `tp_size`. Raises `ModelError` where the division leaves a remainder."""

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns an uninitialised tensor on the context's device, in its dtype unless `dtype` is given."""

    def create_kernel(self, shape: LinearShape) -> LinearKernel:
        """Returns the quantization method's kernel for a linear layer, or a torch kernel where the method has none."""

    def create_embedding_kernel(self, shape: LinearShape) -> LooksUpRows | None:
        """Returns the quantization method's kernel for a table of token embeddings; None: the table stays a plain
        tensor."""

    def create_plain_kernel(self, shape: LinearShape) -> LinearKernel:
        """Returns a kernel in full precision, whatever the quantization method."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AdapterRows:
    """Which low-rank adapter each token of a step has (Hu et al. 2021, arXiv 2106.09685)."""

    slots: torch.Tensor
    """int32 [T] on the context's device: the slot in `ModelContext.adapters`, -1 for none."""


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
    """[T, hidden_size], as `CausalLM.embed` returns them, for tokens that are not (all) text. The model may write into
    the tensor."""
    stage_input: torch.Tensor | None = None
    """[T, hidden_size]: `ModelOutputs.hidden` of the stage before. The model may write into the tensor."""
    layers: tuple[int, ...] = ()
    """Ascending numbers of the decoder layers whose input states are returned as `ModelOutputs.layer_states`. The
    number of layers itself selects the input of the final norm. The host sets it only for families with the capability
    `hidden_layers`; others raise `ModelError`."""
    skipped_layers: frozenset[int] = frozenset()
    """Numbers of the decoder layers that are left out: their input is their output, and their keys and values are
    neither read nor written. The host sets it only for families with the capability `skips_layers`, on models of one
    stage, and never together with `layers`; others raise `ModelError`."""
    adapters: AdapterRows | None = None
    """The adapter of each token; None: no token has one. The host sets it only for modules that were made with
    `ModelContext.adapters`; others raise `ModelError`."""
    token_types: torch.Tensor | None = None
    """int64 [T]: the type of each token, which tells the two texts of a pair apart (BERT's segments); None: all are 0.
    The host sets it only for models with `ModelSize.num_token_types`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelOutputs:
    """What `CausalLM.forward` returns."""

    hidden: torch.Tensor
    """[T, hidden_size]: the last stage returns the output of the final norm, other stages the residual stream after
    their last layer."""
    layer_states: torch.Tensor | None = None
    """[T, n * hidden_size], the n states that `ModelInputs.layers` asks for, concatenated along the last dimension;
    None where it asks for none. A stage returns the inputs of its own layers, the last stage also that of the final
    norm."""


class CausalLM(Protocol):
    """The torch module that a family builds, on the context's device and in its dtype, without weights."""

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns the inputs of the first layer: int64 [N] -> [N, hidden_size]. Drafters use it too. First stage
        only."""

    def forward(self, inputs: ModelInputs) -> ModelOutputs:
        """Computes the step's query tokens. Calls each attention layer of the module once, in order of layer_id. Raises
        `ModelError` for inputs that the family does not take."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits: [N, hidden_size] -> [N, vocab_size], the whole vocabulary on every rank. Last stage only;
        an encoder (`ModelSize.is_encoder`) raises `ModelError`."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor | PackedTensor]], partial: bool = False) -> None:
        """Loads (name, tensor) pairs of the whole model, named as in the Hugging Face checkpoint: each rank keeps its
        share, each stage its layers. With a quantization method, tensors of its `packed_formats` are `PackedTensor`s
        (`dovetail.nn.load_weights` loads them).

        Raises `ModelError` that lists missing tensors and tensors that the model does not have.

        `partial`: the pairs are any of the checkpoint's tensors, and the module was loaded before. Weights that are not
        given keep their values, parts of fused layers too. New weights go into the memory of the old ones, so that
        captured graphs stay valid. Raises `ModelError` that lists names that the model does not have, and for layers
        whose kernels cannot be loaded again. After an error all weights must be loaded again.
        """


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Sizes of the whole model, over all ranks and stages, as its config gives them.

    The host compares `num_layers`, `num_kv_heads`, `head_size`, `latent_size`, `hidden_size`, `is_encoder` and, but for
    encoders, `vocab_size` with the module that `create` builds, and refuses the family where one differs.
    `num_parameters` and `max_model_len` are the family's word: the host refuses only a `num_parameters` far above what
    the checkpoint stores.
    """

    num_parameters: int
    num_layers: int
    """Number of attention layers."""
    num_kv_heads: int
    """Number of key-value heads of the first attention layer."""
    head_size: int
    """Head size of the first attention layer; where it keeps latent vectors, the elements of one (`LatentSpec`)."""
    hidden_size: int
    """Elements of a hidden state: the output of `CausalLM.embed`, and the input of `compute_logits`."""
    vocab_size: int
    """Number of logits of a token."""
    max_model_len: int
    """Longest sequence that the config declares (max_position_embeddings, RoPE scaling included)."""
    latent_size: int = 0
    """Elements of `head_size` that are the latent ones, where the attention layers keep latent vectors and
    `num_kv_heads` is 1 (`LatentSpec.latent_size`); 0: the layers keep keys and values."""
    is_encoder: bool = False
    """Whether the attention layers are not causal and keep nothing (`AttentionLayer.causal`). Such a model has hidden
    states and no logits: it computes whole prompts, and generates nothing. `vocab_size` is then the number of token
    ids that it embeds."""
    num_token_types: int = 0
    """Number of token types (`ModelInputs.token_types`); 0: tokens have none."""
    num_labels: int = 0
    """Labels of the score head of a module that is a `ScoresStates`; 0: it has no head."""

    def cache(self, dtype: str, tensor_parallel: int = 1) -> KVSpec:
        """Returns what each attention layer caches on one of `tensor_parallel` ranks, in pages of `dtype`, as far as
        the sizes tell: without windows."""
        if self.latent_size:
            rotary_size = self.head_size - self.latent_size
            return LatentSpec(latent_size=self.latent_size, rotary_size=rotary_size, dtype=dtype)
        num_kv_heads = max(1, self.num_kv_heads // tensor_parallel)
        spec = TransientSpec if self.is_encoder else KVSpec
        return spec(num_kv_heads=num_kv_heads, head_size=self.head_size, dtype=dtype)


class PredictsFurther(ABC):
    """A `CausalLM` that is a module for multi-token prediction (DeepSeek-V3, section 2.2): it guesses the token after
    the next one, from the state of the main model (or of itself) and the next token.

    Its `forward` is given what `combine` returns as `ModelInputs.embeddings`, at the positions of the states. It has
    one layer, and returns as `ModelOutputs.hidden` the normed output for `compute_logits`, and for `layers=(1,)` the
    same before the norm, which is the state that goes with the next guess.
    """

    @abstractmethod
    def combine(self, embeddings: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Returns the input of the layer [T, hidden_size], from the embeddings of the next tokens (as `CausalLM.embed`
        returns them) and the states before them, both [T, hidden_size]; it writes into neither."""


class ScoresStates(ABC):
    """A `CausalLM` with a score head: from a hidden state to one number for each label (`ModelSize.num_labels`)."""

    @abstractmethod
    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the scores before any activation: [n, hidden_size], rows of `ModelOutputs.hidden`, -> [n,
        num_labels], without collectives: only the rank that answers calls it. Last stage only."""


FURTHER_MODULE = "further_module"
"""A key of configs: number i from 0 on asks a family for the i-th of a checkpoint's modules for multi-token prediction
in the place of the main model. Families that build none refuse it with `ModelError`, or build the main model."""


class ModelFamily(Plugin):
    """One group of architectures that share a module."""

    architectures: ClassVar[Sequence[str]] = ()
    """Values of config.json's "architectures" that the family builds. Empty: `check` alone decides."""

    capabilities: ClassVar[ModelCapabilities] = ModelCapabilities()

    def __init__(self, options: PluginOptions):
        self.options = options

    @abstractmethod
    def size(self, config: Mapping[str, Any]) -> ModelSize:
        """Returns the sizes of the module that `create` builds, from the config alone; the host refuses a family whose
        module differs (`ModelSize` names what is compared). Raises `ModelError` for a config that lacks keys."""

    @abstractmethod
    def create(self, config: Mapping[str, Any], context: ModelContext) -> CausalLM:
        """Builds the module. Raises `ModelError` for values that it cannot serve (head counts that do not divide by
        tensor_parallel, an unknown RoPE type), and for stages without the capability `stages`."""
