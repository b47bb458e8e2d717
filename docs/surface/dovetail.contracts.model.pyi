import torch
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from dovetail.contracts.attention import AttentionModule
from dovetail.contracts.kv import KVSpec
from dovetail.contracts.operators import Operators
from dovetail.contracts.plugin import Plugin, PluginOptions
from dovetail.contracts.quantization import LinearKernel, LinearShape, LooksUpRows, QuantizationMethod
from dovetail.contracts.weights import PackedTensor
from typing import Any, ClassVar, Protocol


@dataclass(frozen=True, kw_only=True)
class ModelCapabilities:
    tensor_parallel: int | None = 1
    quantization: bool = False
    operators: bool = False
    batch_invariant: bool = False
    hidden_layers: bool = False
    skips_layers: bool = False
    graph_capture: bool = False
    adapters: bool = False
    stages: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelNeed:
    config: Mapping[str, Any]
    tensor_parallel: int
    device_type: str
    dtype: str
    pipeline_parallel: int = 1
    batch_invariant: bool = False
    adapters: bool = False


class Communicator(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor: ...
    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor: ...


class AdapterRegistry(Protocol):
    @property
    def max_loras(self) -> int: ...
    @property
    def max_rank(self) -> int: ...


class ModelContext(Protocol):
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    kv_dtype: str
    communicator: Communicator
    quantization: QuantizationMethod | None
    batch_invariant: bool
    operators: Operators
    attention_layers: list[AttentionModule]
    is_first_stage: bool
    is_last_stage: bool
    @property
    def adapters(self) -> AdapterRegistry | None: ...
    def held_layers(self, num_layers: int) -> range: ...
    @property
    def tp_rank(self) -> int: ...
    @property
    def tp_size(self) -> int: ...
    def divide(self, total: int, what: str) -> int: ...
    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor: ...
    def create_kernel(self, shape: LinearShape) -> LinearKernel: ...
    def create_embedding_kernel(self, shape: LinearShape) -> LooksUpRows | None: ...
    def create_plain_kernel(self, shape: LinearShape) -> LinearKernel: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class AdapterRows:
    slots: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelInputs:
    positions: torch.Tensor
    input_ids: torch.Tensor | None = None
    embeddings: torch.Tensor | None = None
    stage_input: torch.Tensor | None = None
    layers: tuple[int, ...] = ()
    skipped_layers: frozenset[int] = frozenset()
    adapters: AdapterRows | None = None
    token_types: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelOutputs:
    hidden: torch.Tensor
    layer_states: torch.Tensor | None = None


class CausalLM(Protocol):
    def embed(self, input_ids: torch.Tensor) -> torch.Tensor: ...
    def forward(self, inputs: ModelInputs) -> ModelOutputs: ...
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor: ...
    def load_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor | PackedTensor]],
        partial: bool = False,
    ) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    num_parameters: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    latent_size: int = 0
    is_encoder: bool = False
    num_token_types: int = 0
    num_labels: int = 0
    def cache(self, dtype: str, tensor_parallel: int = 1) -> KVSpec: ...


class PredictsFurther(ABC):
    @abstractmethod
    def combine(self, embeddings: torch.Tensor, states: torch.Tensor) -> torch.Tensor: ...


class ScoresStates(ABC):
    @abstractmethod
    def score(self, hidden: torch.Tensor) -> torch.Tensor: ...

FURTHER_MODULE = 'further_module'

class ModelFamily(Plugin):
    architectures: ClassVar[Sequence[str]] = ()
    capabilities: ClassVar[ModelCapabilities] = ModelCapabilities()
    def __init__(self, options: PluginOptions): ...
    options: PluginOptions
    @abstractmethod
    def size(self, config: Mapping[str, Any]) -> ModelSize: ...
    @abstractmethod
    def create(self, config: Mapping[str, Any], context: ModelContext) -> CausalLM: ...
