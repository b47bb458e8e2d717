import numpy as np, torch
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from dovetail.contracts.kv import KVSpec, LatentSpec
from dovetail.contracts.plugin import Plugin, PluginOptions
from typing import ClassVar, Protocol


@dataclass(frozen=True, kw_only=True)
class AttentionCapabilities:
    device_types: frozenset[str] | None = frozenset()
    dtypes: frozenset[str] = frozenset()
    head_sizes: frozenset[int] | None = None
    block_size_multiple: int = 1
    sliding_window: bool = False
    soft_cap: bool = False
    alibi: bool = False
    trees: bool = False
    graph_capture: bool = False
    batch_invariant: bool = False
    kv_dtypes: frozenset[str] | None = None
    sinks: bool = False
    chunked: bool = False
    latents: bool = False
    bidirectional: bool = False


@dataclass(frozen=True)
class AttentionNeed:
    device_type: str
    dtype: str
    block_size: int
    head_sizes: frozenset[int]
    sliding_window: bool = False
    soft_cap: bool = False
    alibi: bool = False
    trees: bool = False
    batch_invariant: bool = False
    kv_dtype: str = ''
    sinks: bool = False
    chunked: bool = False
    latents: bool = False
    bidirectional: bool = False


@dataclass(frozen=True)
class Reach:
    window: int | None = None
    chunk: int | None = None
    @property
    def is_all(self) -> bool: ...
    def first_key(self, position: int) -> int: ...
    def first_keys(self, positions: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True)
class AttentionLayer:
    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0
    first_head: int = 0
    total_heads: int = 0
    sinks: torch.Tensor | None = field(default=None, compare=False)
    chunk: int | None = None
    causal: bool = True
    @property
    def reach(self) -> Reach: ...


@dataclass(frozen=True, kw_only=True)
class TransientSpec(KVSpec):
    window: int | None = field(init=False, default=None)
    def page_bytes(self, block_size: int) -> int: ...


@dataclass(frozen=True)
class AttentionSetup:
    layers: tuple[AttentionLayer, ...]
    spec: KVSpec
    block_size: int
    dtype: str
    device: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    batch_invariant: bool = False
    @property
    def latent(self) -> LatentSpec | None: ...
    @property
    def keeps_nothing(self) -> bool: ...


@dataclass(frozen=True)
class AttentionBatch:
    query_start: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    slot_mapping: np.ndarray
    max_query_len: int
    max_seq_len: int
    tree_masks: Mapping[int, np.ndarray] = field(default_factory=dict)
    is_for_graph: bool = False
    spans: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)


class AttentionModule(Protocol):
    @property
    def layer(self) -> AttentionLayer: ...
    @property
    def cache(self) -> KVSpec: ...
    def bind(self, backend: AttentionBackend, kv_cache: torch.Tensor) -> None: ...
    def move_slots(self, source: torch.Tensor, target: torch.Tensor) -> None: ...


class AttentionBackend(Plugin):
    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities()
    def __init__(self, options: PluginOptions, setup: AttentionSetup): ...
    options: PluginOptions
    setup: AttentionSetup
    @abstractmethod
    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]: ...
    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None: ...
    @abstractmethod
    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor: ...


class RotatesAndWrites(AttentionBackend):
    @abstractmethod
    def rotate_and_forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor: ...


class AttendsLatents(AttentionBackend):
    @abstractmethod
    def latent_forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        latent: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor: ...


class AttendsBothWays(AttentionBackend):
    @abstractmethod
    def both_ways_forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor: ...


class MovesSlots(AttentionBackend):
    @abstractmethod
    def move_slots(
        self,
        kv_cache: torch.Tensor,
        source: torch.Tensor,
        target: torch.Tensor,
    ) -> None: ...
