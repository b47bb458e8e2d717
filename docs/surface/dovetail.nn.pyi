import torch
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from dovetail.contracts.attention import AttentionBackend, AttentionModule
from dovetail.contracts.model import AdapterRows, Communicator, ModelContext
from dovetail.contracts.operators import Operators, OperatorsCapabilities
from dovetail.contracts.quantization import LinearKernel, LinearShape, LooksUpRows, QuantizationMethod
from dovetail.contracts.weights import PackedTensor
from dovetail.nn.adapters import Layers
from dovetail.nn.collectives import CallsCollectives, Collective
from dovetail.nn.kernels import PackedLinear, TiledLinear, TorchLinear, plain_kernel
from dovetail.nn.loading import WeightHolder, WeightRules, expected_shapes, load_weights, num_parameters
from dovetail.nn.mlp import Activation
from dovetail.nn.moe import ExpertNames, SparseMoE, SparseShape
from dovetail.nn.native.kept_kernels import KernelKeeper
from dovetail.nn.stages import StagedCausalLM, check_inputs, check_whole
from dovetail.nn.waiting import MayWait
from typing import Any, ClassVar

__all__ = [
    "AdapterSpace",
    "Attention",
    "BuildContext",
    "CallsCollectives",
    "Collective",
    "ColumnLinear",
    "Communicator",
    "EncoderAttention",
    "ExpertNames",
    "GatedMLP",
    "GroupRouter",
    "GroupRouting",
    "LMHead",
    "LatentAttention",
    "LatentShape",
    "LayerAdapters",
    "LayerNorm",
    "Linear",
    "LinearPart",
    "LowRank",
    "MayWait",
    "MergedColumnLinear",
    "ModelContext",
    "OffsetRMSNorm",
    "PackedLinear",
    "PlainMLP",
    "QKVLinear",
    "RMSNorm",
    "ReplicatedLinear",
    "RopeSpec",
    "RotaryEmbedding",
    "Rotation",
    "RowLinear",
    "SingleProcess",
    "SparseMoE",
    "SparseShape",
    "StagedCausalLM",
    "TiledLinear",
    "TorchDistributed",
    "TorchLinear",
    "TorchOperators",
    "VERSION",
    "VocabEmbedding",
    "WeightHolder",
    "WeightRules",
    "activation",
    "check_inputs",
    "check_whole",
    "expected_shapes",
    "gated_activation",
    "halves_from_pairs",
    "load_weights",
    "num_parameters",
    "plain_kernel",
    "torch_operators",
]

class AdapterSpace(MayWait):
    def __init__(self, max_loras: int, max_rank: int, dtype: torch.dtype, device: torch.device): ...
    max_loras: int
    max_rank: int
    dtype: torch.dtype
    device: torch.device
    rules: ...
    is_open: bool
    rows: AdapterRows | None
    groups: Sequence[tuple[int, torch.Tensor]]
    layers: list[LayerAdapters]
    def why_it_waits(self) -> str | None: ...
    def register(self, context: ModelContext, parts: Sequence[LinearPart]) -> LayerAdapters: ...
    def expected(self) -> dict[str, tuple[int, int]]: ...
    @property
    def bytes_per_slot(self) -> int: ...
    def translated(self, layers: Layers) -> dict[str, LowRank]: ...
    def check(self, layers: Layers) -> None: ...
    def load(self, slot: int, layers: Layers) -> None: ...
    def clear(self, slot: int) -> None: ...
    @contextmanager
    def bound(self, rows: AdapterRows) -> Iterator[None]: ...


class Attention(torch.nn.Module):
    def __init__(
        self,
        context: ModelContext,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        alibi_slopes: Sequence[float] | None = None,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
        has_sinks: bool = False,
        chunk: int | None = None,
    ): ...
    layer: ...
    cache: ...
    def bind(self, backend: AttentionBackend, kv_cache: torch.Tensor) -> None: ...
    def move_slots(self, source: torch.Tensor, target: torch.Tensor) -> None: ...
    def rotate_and_forward(
        self,
        queries_keys: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
    ) -> torch.Tensor: ...
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation | None = None,
    ) -> torch.Tensor: ...


@dataclass
class BuildContext:
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    kv_dtype: str
    communicator: Communicator = field(default_factory=SingleProcess)
    quantization: QuantizationMethod | None = None
    batch_invariant: bool = False
    operators: Operators = field(default_factory=torch_operators)
    keeper: KernelKeeper | None = None
    layers: range | None = None
    is_first_stage: bool = True
    is_last_stage: bool = True
    attention_layers: list[AttentionModule] = field(default_factory=list, init=False)
    adapters: AdapterSpace | None = None
    @property
    def tp_rank(self) -> int: ...
    @property
    def tp_size(self) -> int: ...
    def held_layers(self, num_layers: int) -> range: ...
    def divide(self, total: int, what: str) -> int: ...
    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor: ...
    def create_kernel(self, shape: LinearShape) -> LinearKernel: ...
    def create_embedding_kernel(self, shape: LinearShape) -> LooksUpRows | None: ...
    def create_plain_kernel(self, shape: LinearShape) -> LinearKernel: ...


class ColumnLinear(MergedColumnLinear):
    def __init__(
        self,
        context: ModelContext,
        name: str,
        in_features: int,
        out_features: int,
        bias: bool = False,
    ): ...


class EncoderAttention(torch.nn.Module):
    def __init__(
        self,
        context: ModelContext,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        scale: float,
    ): ...
    layer: ...
    cache: ...
    def bind(self, backend: AttentionBackend, kv_cache: torch.Tensor) -> None: ...
    def move_slots(self, source: torch.Tensor, target: torch.Tensor) -> None: ...
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor: ...


class GatedMLP(torch.nn.Module):
    def __init__(
        self,
        context: ModelContext,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        bias: bool = False,
        reduce: bool = True,
    ): ...
    gate_up_proj: ...
    down_proj: ...
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...


class GroupRouter(WeightHolder):
    def __init__(self, context: ModelContext, name: str, hidden_size: int, routing: GroupRouting): ...
    kernel: ...
    bias: ...
    def expected(self) -> Mapping[str, tuple[int, ...]]: ...
    def load(self, name: str, tensor: torch.Tensor) -> None: ...
    def finish(self) -> None: ...
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class GroupRouting:
    num_experts: int
    top_k: int
    num_groups: int = 1
    top_groups: int = 1
    has_sigmoid: bool = False
    has_bias: bool = False
    normalize: bool = False
    factor: float = 1.0


class LMHead(WeightHolder, CallsCollectives):
    takes_packed = True
    def __init__(
        self,
        context: ModelContext,
        name: str,
        vocab_size: int,
        hidden_size: int,
        tied: VocabEmbedding | None = None,
        bias: bool = False,
    ): ...
    vocab_size: int
    bias: ...
    kernel: ...
    def forward(self, hidden: torch.Tensor) -> torch.Tensor: ...
    def collectives(self) -> tuple[Collective, ...]: ...
    def expected(self) -> Mapping[str, tuple[int, ...]]: ...
    def sources(self) -> Sequence[WeightHolder]: ...
    def load(self, name: str, tensor: torch.Tensor | PackedTensor) -> None: ...
    def finish(self) -> None: ...


class LatentAttention(WeightHolder):
    def __init__(self, context: ModelContext, name: str, shape: LatentShape, scale: float): ...
    shape: LatentShape
    layer: ...
    cache: ...
    def expected(self) -> Mapping[str, tuple[int, ...]]: ...
    def load(self, name: str, tensor: torch.Tensor) -> None: ...
    def finish(self) -> None: ...
    def bind(self, backend: AttentionBackend, kv_cache: torch.Tensor) -> None: ...
    def move_slots(self, source: torch.Tensor, target: torch.Tensor) -> None: ...
    def forward(
        self,
        query: torch.Tensor,
        rotated: torch.Tensor,
        latent: torch.Tensor,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    num_heads: int
    latent_size: int
    key_size: int
    rotary_size: int
    value_size: int


class LayerAdapters:
    def __init__(self, space: AdapterSpace, context: ModelContext, parts: Sequence[LinearPart]): ...
    parts: ...
    a: ...
    b: ...
    ranks: ...
    part_starts: ...
    adds: ...
    is_batch_invariant: ...
    def add(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor: ...
    def place(self, slot: int, number: int, given: LowRank) -> None: ...
    def settle(self, slot: int) -> None: ...
    def clear(self, slot: int) -> None: ...


class LayerNorm(WeightHolder):
    def __init__(self, context: ModelContext, name: str, size: int, eps: float, bias: bool = True): ...
    weight: ...
    bias: ...
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...
    def expected(self) -> Mapping[str, tuple[int, ...]]: ...
    def load(self, name: str, tensor: torch.Tensor) -> None: ...


class Linear(WeightHolder):
    takes_packed = True
    def __init__(
        self,
        context: ModelContext,
        name: str,
        parts: Sequence[LinearPart],
        bias: bool,
        quantize: bool = True,
    ): ...
    kernel: ...
    bias: ...
    adapters: ...
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...
    def expected(self) -> Mapping[str, tuple[int, ...]]: ...
    def load(self, name: str, tensor: torch.Tensor | PackedTensor) -> None: ...
    def finish(self) -> None: ...


@dataclass(frozen=True)
class LinearPart:
    source: str
    shape: tuple[int, int]
    take: tuple[slice, slice]
    rows: slice


@dataclass(frozen=True, eq=False)
class LowRank:
    a: torch.Tensor
    b: torch.Tensor
    scale: float = 1.0
    @property
    def rank(self) -> int: ...


class MergedColumnLinear(Linear):
    def __init__(
        self,
        context: ModelContext,
        name: str,
        in_features: int,
        parts: Mapping[str, int],
        bias: bool = False,
    ): ...


class OffsetRMSNorm(WeightHolder):
    def __init__(self, context: ModelContext, name: str, size: int, eps: float): ...
    weight: ...
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...
    def expected(self) -> Mapping[str, tuple[int, ...]]: ...
    def load(self, name: str, tensor: torch.Tensor) -> None: ...


class PlainMLP(torch.nn.Module):
    def __init__(
        self,
        context: ModelContext,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        bias: bool = False,
    ): ...
    up_proj: ...
    down_proj: ...
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...


class QKVLinear(Linear):
    def __init__(
        self,
        context: ModelContext,
        name: str,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        names: tuple[str, str, str],
        bias: bool = False,
    ): ...
    num_heads: ...
    num_kv_heads: ...
    head_size: int


class RMSNorm(WeightHolder):
    def __init__(self, context: ModelContext, name: str, size: int, eps: float): ...
    weight: ...
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...
    def add(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def expected(self) -> Mapping[str, tuple[int, ...]]: ...
    def load(self, name: str, tensor: torch.Tensor) -> None: ...


class ReplicatedLinear(Linear):
    def __init__(
        self,
        context: ModelContext,
        name: str,
        in_features: int,
        out_features: int,
        bias: bool = False,
    ): ...


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    head_size: int
    rotary_size: int
    theta: float
    max_position_embeddings: int
    kind: str = 'default'
    scaling: Mapping[str, Any] = field(default_factory=dict)


class RotaryEmbedding(torch.nn.Module):
    def __init__(self, context: ModelContext, spec: RopeSpec): ...
    def forward(self, positions: torch.Tensor) -> Rotation: ...


@dataclass(frozen=True)
class Rotation:
    cos: torch.Tensor
    sin: torch.Tensor
    operators: Operators
    def apply(self, x: torch.Tensor) -> torch.Tensor: ...


class RowLinear(Linear, CallsCollectives):
    def __init__(
        self,
        context: ModelContext,
        name: str,
        in_features: int,
        out_features: int,
        bias: bool = False,
        reduce: bool = True,
    ): ...
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...
    def collectives(self) -> tuple[Collective, ...]: ...


class SingleProcess:
    rank = 0
    size = 1
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor: ...
    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor: ...


class TorchDistributed:
    def __init__(self, group: Any = None): ...
    rank: int
    size: int
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor: ...
    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor: ...


class TorchOperators(Operators):
    contract = (1, 0)
    stability = 'provisional'
    preference: ClassVar[int] = -5
    capabilities = OperatorsCapabilities(device_types=None, dtypes=None)
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...
    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor: ...
    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor: ...

VERSION = ...

class VocabEmbedding(WeightHolder, CallsCollectives):
    takes_packed = True
    def __init__(self, context: ModelContext, name: str, vocab_size: int, hidden_size: int): ...
    vocab_size: int
    hidden_size: int
    name: str
    kernel: ...
    weight: ...
    def output_kernel(self) -> LinearKernel: ...
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor: ...
    def collectives(self) -> tuple[Collective, ...]: ...
    def expected(self) -> Mapping[str, tuple[int, ...]]: ...
    def load(self, name: str, tensor: torch.Tensor | PackedTensor) -> None: ...
    def finish(self) -> None: ...

def activation(name: str) -> Activation: ...
def gated_activation(context: ModelContext, name: str) -> Activation: ...
def halves_from_pairs(weight: torch.Tensor, head_size: int, rotary_size: int) -> torch.Tensor: ...
def torch_operators() -> Operators: ...
