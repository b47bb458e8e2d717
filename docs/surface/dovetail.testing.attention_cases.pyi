import numpy as np, torch
from collections.abc import Sequence
from dataclasses import dataclass
from dovetail.contracts.attention import AttentionBackend, AttentionBatch, AttentionLayer, AttentionSetup


@dataclass(frozen=True)
class CaseShape:
    dtype: str = 'float32'
    device: str = 'cpu'
    block_size: int | None = None
    head_size: int | None = None
    max_requests: int = 6
    max_cached: int = 70
    max_query: int = 40
    has_window: bool = False
    has_soft_cap: bool = False
    has_alibi: bool = False
    has_sinks: bool = False
    has_trees: bool = False
    has_chunks: bool = False
    lengths: tuple[tuple[int, int], ...] | None = None
    num_kv_heads: int | None = None


@dataclass(frozen=True)
class CaseRequest:
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    block_ids: tuple[int, ...]
    num_shared: int
    tree: np.ndarray | None
    @property
    def query_len(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def num_cached(self) -> int: ...
    def block_row(self, block_size: int, window: int | None) -> list[int]: ...


@dataclass(frozen=True)
class AttentionCase:
    setup: AttentionSetup
    num_blocks: int
    requests: tuple[CaseRequest, ...]
    layer_index: int = 0
    @property
    def layer(self) -> AttentionLayer: ...
    def batch(self) -> AttentionBatch: ...
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
    def with_inputs(self, query: torch.Tensor, key: torch.Tensor) -> AttentionCase: ...
    def make_cache(self, backend: AttentionBackend, padding: int = 0) -> torch.Tensor: ...
    def write_past(self, backend: AttentionBackend, kv_cache: torch.Tensor) -> None: ...
    def filled_cache(self, backend: AttentionBackend, padding: int = 0) -> torch.Tensor: ...
    def run(self, backend: AttentionBackend, kv_cache: torch.Tensor) -> torch.Tensor: ...
    def forward(
        self,
        backend: AttentionBackend,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor: ...
    def run_from_scratch(self, backend: AttentionBackend, padding: int = 0) -> torch.Tensor: ...
    def expected(self) -> torch.Tensor: ...

def as_cached(vectors: torch.Tensor, kv_dtype: str) -> torch.Tensor: ...
def keys_as_cached(keys: torch.Tensor, kv_dtype: str) -> torch.Tensor: ...
def turned(vectors: torch.Tensor) -> torch.Tensor: ...
def unreadable_number(dtype: torch.dtype) -> float: ...
def make_batch(
    rows: Sequence[tuple[Sequence[int], int, int]],
    setup: AttentionSetup,
    tree_masks: dict[int, np.ndarray] | None = None,
) -> AttentionBatch: ...
def brute_force(layer: AttentionLayer, request: CaseRequest) -> np.ndarray: ...
def attended_by_pairs(
    layer: AttentionLayer,
    request: CaseRequest,
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
) -> np.ndarray: ...
def random_case(seed: int, shape: CaseShape) -> AttentionCase: ...
def random_tree(rng: np.random.Generator, num_tokens: int) -> np.ndarray: ...
