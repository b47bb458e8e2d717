"""Attention backend: the KV page layout, the per-step plan, and attention over paged KV.

One backend object serves one KV group on one worker; a drafter's own layers have another object. Call order::

    backend = Backend(options, setup)            once, before weights are bound
    shape = backend.kv_cache_shape(num_blocks)   once per layer; the host allocates the storage
    each step:
        backend.plan(batch)                      once; reads host arrays, fills buffers the backend owns
        backend.forward(layer, q, k, v, cache)   once per layer; reads only what plan() prepared
          or rotate_and_forward, of a `RotatesAndWrites`; latent_forward, of an `AttendsLatents`; both_ways_forward, of
      an `AttendsBothWays`

`plan` may look at host values; `forward` must not synchronise with the device, so that a step can be captured
in a graph where the backend declares `graph_capture`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

from dovetail.contracts.errors import PluginError
from dovetail.contracts.kv import DTYPE_BYTES, KVSpec, LatentSpec
from dovetail.contracts.needs import (
    RUNS_ON,
    SERVES_DTYPES,
    Rule,
    among,
    backed_by,
    by_rule,
    compared,
    flag,
    listed,
    multiple_of,
    within,
)
from dovetail.contracts.plugin import Plugin, PluginOptions
from dovetail.contracts.reserved import refuse_reserved

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True, kw_only=True)
class AttentionCapabilities:
    """What a backend can do. The host asks these, never the backend's name."""

    device_types: frozenset[str] | None = frozenset()
    """Devices that the backend runs on, as torch names them ("cpu", "cuda"); None: any."""
    dtypes: frozenset[str] = frozenset()
    """dtypes of query, key and value, in torch's spelling ("float32", "bfloat16", ...)."""
    head_sizes: frozenset[int] | None = None
    """Head sizes served; None: any."""
    block_size_multiple: int = 1
    """Block sizes must be multiples of this."""
    sliding_window: bool = False
    soft_cap: bool = False
    alibi: bool = False
    trees: bool = field(default=False, metadata=backed_by("MovesSlots"))
    """Verify rows may carry `AttentionBatch.tree_masks`; such a backend is a `MovesSlots`."""
    graph_capture: bool = False
    """`forward` can be captured in a graph: after the `plan` of a batch that `is_for_graph`, its launches, and the
    memory that they read, depend on the batch's R, T and max_query_len only, and everything else that `plan` learned is
    in buffers that later plans update in place."""
    batch_invariant: bool = False
    """A row's output bits depend on its query and the keys that it sees, and on nothing else in the step: not on other
    requests, nor on which of its own tokens are computed with it. A backend that pays for this with speed does it only
    where `AttentionSetup.batch_invariant` asks for it."""
    kv_dtypes: frozenset[str] | None = None
    """dtypes of keys and values in the pages, with queries of any of `dtypes`; None: only the queries' own."""
    sinks: bool = False
    """The backend serves layers with `AttentionLayer.sinks`."""
    chunked: bool = False
    """The backend serves layers with `AttentionLayer.chunk`."""
    latents: bool = field(default=False, metadata=backed_by("AttendsLatents"))
    """Pages may hold latent vectors (`LatentSpec`), in `dtypes` of two bytes or more; such a backend is an
    `AttendsLatents`. Of the other features, layers with latents have trees and batch invariance at most."""
    bidirectional: bool = field(default=False, metadata=backed_by("AttendsBothWays"))
    """The backend serves layers that are not causal and keep nothing (`AttentionLayer.causal`); such a backend is an
    `AttendsBothWays`. Of the other features, these layers have batch invariance at most."""


class _PageDtype(Rule):
    """Compares the dtype of pages with `kv_dtypes`, or with the queries' dtype where `kv_dtypes` is None."""

    def against(self, name: str, can: AttentionCapabilities, need: AttentionNeed, asked: str) -> str | None:
        kv_dtype = asked or need.dtype
        if kv_dtype == need.dtype and (can.kv_dtypes is None or need.dtype not in can.dtypes):
            return None  # what there is to say, the dtype of the queries says
        if can.kv_dtypes is None:
            return (
                f"{name} keeps keys and values in the model's dtype, {need.dtype}, not in {kv_dtype}; set cache.dtype."
            )
        if kv_dtype in can.kv_dtypes:
            return None
        return f"{name} keeps keys and values in {listed(can.kv_dtypes)}, not in {kv_dtype}; set cache.dtype."


class _Latents(Rule):
    """Compares with `latents`, and refuses quantized pages."""

    def against(self, name: str, can: AttentionCapabilities, need: AttentionNeed, asked: bool) -> str | None:
        if not asked:
            return None
        if not can.latents:
            return f"{name} has no multi-head latent attention; choose another backend, or auto."
        if DTYPE_BYTES.get(need.kv_dtype, 2) < 2:
            return f"pages of latent vectors cannot be {need.kv_dtype} yet; set cache.dtype to auto."
        return None


def _feature(capability: str, words: str) -> Mapping[str, Rule]:
    return compared(capability, flag, f"{{name}} has no {words}; choose another backend, or auto.")


@dataclass(frozen=True)
class AttentionNeed:
    """What one KV group asks of a backend; the argument of `check`."""

    device_type: str = field(metadata=compared("device_types", among, RUNS_ON))
    dtype: str = field(metadata=compared("dtypes", among, SERVES_DTYPES))
    block_size: int = field(
        metadata=compared(
            "block_size_multiple",
            multiple_of,
            "{name} needs a block size that is a multiple of {has}, not {asked}; set cache.block_size.",
        )
    )
    head_sizes: frozenset[int] = field(
        metadata=compared("head_sizes", within, "{name} serves the head sizes {has}; the model has {asked}.")
    )
    sliding_window: bool = field(default=False, metadata=_feature("sliding_window", "sliding window"))
    soft_cap: bool = field(default=False, metadata=_feature("soft_cap", "soft cap of the scores"))
    alibi: bool = field(default=False, metadata=_feature("alibi", "ALiBi bias"))
    trees: bool = field(default=False, metadata=_feature("trees", "tree masks"))
    batch_invariant: bool = field(default=False, metadata=_feature("batch_invariant", "batch-invariant mode"))
    kv_dtype: str = field(default="", metadata=by_rule(_PageDtype()))
    """dtype of the pages; empty: the same as `dtype`."""
    sinks: bool = field(default=False, metadata=_feature("sinks", "attention sinks"))
    """Some layer has `AttentionLayer.sinks`."""
    chunked: bool = field(default=False, metadata=_feature("chunked", "chunked attention"))
    """Some layer has `AttentionLayer.chunk`."""
    latents: bool = field(default=False, metadata=by_rule(_Latents()))
    """The layers keep `LatentSpec`s."""
    bidirectional: bool = field(
        default=False,
        metadata=compared(
            "bidirectional",
            flag,
            "{name} attends to what came before only, over pages, and an encoder's tokens see their whole sequence; "
            "choose another backend, or auto.",
        ),
    )
    """The layers are not causal (`AttentionLayer.causal`)."""


@dataclass(frozen=True)
class Reach:
    """How far back the queries of a layer see: everything, a sliding window, or the chunk that they are in."""

    window: int | None = None
    """As `AttentionLayer.window`."""
    chunk: int | None = None
    """As `AttentionLayer.chunk`."""

    @property
    def is_all(self) -> bool:
        """Whether a query sees all keys before it."""
        return self.window is None and self.chunk is None

    def first_key(self, position: int) -> int:
        """Position of the first key that the query at `position` sees. The last one is its own."""
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0 if self.window is None else max(0, position - self.window + 1)

    def first_keys(self, positions: np.ndarray) -> np.ndarray:
        """`first_key` of each of `positions`, in their dtype."""
        if self.chunk is not None:
            return positions - positions % self.chunk
        # min in place of max(0, ...): whatever the dtype, no number leaves it.
        return positions - (positions if self.window is None else positions.clip(max=self.window - 1))


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer as the backend sees it, on one tensor-parallel rank."""

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    """Factor of the dot products, usually head_size ** -0.5."""
    window: int | None = None
    """Sliding window as in `KVSpec.window`."""
    soft_cap: float | None = None
    """Scores s become soft_cap * tanh(s / soft_cap) before the softmax (Gemma 2, section 2)."""
    alibi_slopes: tuple[float, ...] | None = None
    """One slope m per head: m * (key position - query position) is added to the scaled and capped score (ALiBi,
    section 3)."""
    key_scale: float = 1.0
    """Pages of fp8 hold key / key_scale, clamped to the largest number of their dtype. Other dtypes do not use it."""
    value_scale: float = 1.0
    """As `key_scale`, for values."""
    first_head: int = 0
    """Index of this rank's first head in the whole layer."""
    total_heads: int = 0
    """Number of heads of the whole layer, over all ranks; 0: `num_heads`."""
    sinks: torch.Tensor | None = field(default=None, compare=False)
    """float32 [num_heads] on the layer's device: for each head the score of a sink, a key without a value that every
    query sees in addition to its keys. So weights may sum to less than 1 (gpt-oss, section 2.2). Scale, soft cap and
    bias do not apply to the score. The host fills the tensor in place when weights are loaded, and again when they
    change; its address stays."""
    chunk: int | None = None
    """Positions per chunk. The query at position p sees the keys at p - p % chunk .. p (Llama 4). `KVSpec.window` then
    equals the chunk, and `window` is None."""

    causal: bool = True
    """Whether queries see no keys after their own position. False, for encoders: a query sees all keys of its request
    and no others. Requests are then computed whole in one step and the layer keeps nothing between steps
    (`TransientSpec`), so it has no window, chunk, soft cap, ALiBi or sinks."""

    def __post_init__(self) -> None:
        options = (self.window, self.chunk, self.soft_cap, self.alibi_slopes, self.sinks)
        if not self.causal and any(option is not None for option in options):
            raise PluginError(
                "an AttentionLayer that is not causal has no window, chunk, soft_cap, alibi_slopes or sinks: leave "
                "them out"
            )

    @property
    def reach(self) -> Reach:
        """How far back the layer's queries see."""
        return Reach(self.window, self.chunk)


@dataclass(frozen=True, kw_only=True)
class TransientSpec(KVSpec):
    """Keys and values that live in the step that computes them and no longer: those of an encoder, whose requests are
    computed whole. There are no pages of them. Queries see all keys of their own request (`AttentionLayer.causal`)."""

    window: int | None = field(init=False, default=None)

    def page_bytes(self, block_size: int) -> int:
        """None."""
        return 0


@dataclass(frozen=True)
class AttentionSetup:
    """Facts that do not change while the backend lives: the sizes of the buffers it should own."""

    layers: tuple[AttentionLayer, ...]
    spec: KVSpec
    """What each layer of the group caches; a `LatentSpec` only where the backend declares `latents`, a `TransientSpec`
    only where it declares `bidirectional`."""
    block_size: int
    dtype: str
    device: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    batch_invariant: bool = False
    """Whether results must be batch-invariant as `AttentionCapabilities.batch_invariant` defines it."""

    @property
    def latent(self) -> LatentSpec | None:
        """`spec`, where the layers keep latent vectors; else None."""
        return self.spec if isinstance(self.spec, LatentSpec) else None

    @property
    def keeps_nothing(self) -> bool:
        """Whether the layers are not causal and have no pages: `spec` is a `TransientSpec`."""
        return isinstance(self.spec, TransientSpec)


@dataclass(frozen=True)
class AttentionBatch:
    """The rows of one step, on the host.

    The batch has R requests with T query tokens in all. Arrays are views into buffers that the host owns and overwrites
    in the next step: copy what must live longer. The query tokens of request r are rows query_start[r] .. query_start[r
    + 1] - 1, and its last tokens: the i-th is at key position seq_lens[r] - query_len[r] + i. Prefill, chunked prefill,
    decode and verify rows come mixed, in any order.

    For layers that keep nothing (`AttentionSetup.keeps_nothing`) each request's query is all of it, `block_table` is
    [R, 0] and `slot_mapping` is empty.
    """

    query_start: np.ndarray
    """[R + 1] int32, query_start[0] == 0, query_start[R] == T. No request has an empty query."""
    seq_lens: np.ndarray
    """[R] int32: number of keys after this step, those of the query included."""
    block_table: np.ndarray
    """[R, max_blocks] int32: block_table[r, j] holds positions j * block_size .. of request r. Do not read pages beyond
    the sequence, or pages that a sliding window has freed: their entries are 0, or blocks that the request already
    holds for later tokens."""
    slot_mapping: np.ndarray
    """[T] int64: the slot to which key and value of each query token are written: block id * block_size + offset."""
    max_query_len: int
    max_seq_len: int
    tree_masks: Mapping[int, np.ndarray] = field(default_factory=dict)
    """Request index r -> bool [query_len, query_len]: entry (i, j) says whether query token i sees query token j:
    itself and its ancestors. Every query token sees all keys before the query. Requests without an entry follow the
    usual causal rule. For a window, a chunk and ALiBi, the position of a tree's token is the number of keys before the
    query plus its depth (the number of its ancestors in the query), whatever its slot."""
    is_for_graph: bool = False
    """The step will be captured, or replays a step that was captured with equal R, T and max_query_len. All requests
    have the same query length. Padding requests have block tables of 0 and write to block 0, which is never read.
    Padding tokens after a request's real tokens write there too."""
    spans: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Reserved; raises `PluginError`. Request index r -> (first, end) key positions of its spans. The tokens of a span
    see each other in both directions, as the tokens of an image do in some models (PaliGemma, section 3.2)."""

    def __post_init__(self) -> None:
        if self.spans:  # made in every step
            missing = "no attention backend reads masks of spans yet"
            refuse_reserved("AttentionBatch", {"spans": (self.spans, missing)})


class AttentionModule(Protocol):
    """One attention layer of a model's module, as `dovetail.nn.Attention` is: it calls the backend that it is bound
    to."""

    @property
    def layer(self) -> AttentionLayer:
        """Head counts of this rank, scale, window."""

    @property
    def cache(self) -> KVSpec:
        """What the layer caches between steps; a `TransientSpec` where `layer` is not causal."""

    def bind(self, backend: AttentionBackend, kv_cache: torch.Tensor) -> None:
        """Makes the layer call `backend` from now on, with `kv_cache`, a tensor of the backend's `kv_cache_shape`; an
        empty one for a layer that caches nothing."""

    def move_slots(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies cached keys and values of single tokens as `MovesSlots.move_slots` does."""


class AttentionBackend(Plugin):
    """Attention over paged keys and values for every kind of row in one batch."""

    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities()

    def __init__(self, options: PluginOptions, setup: AttentionSetup):
        self.options = options
        self.setup = setup

    @abstractmethod
    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Returns the shape of one layer's cache, in elements of `setup.spec.dtype` (for int8: bytes, scales included).

        Dimension 0 must be `num_blocks`, and each page must take `setup.spec.page_bytes(block_size)` bytes: the host
        copies, swaps and counts pages without knowing their layout. The host hands back a zero-initialised tensor of
        this shape whose pages are contiguous; the stride of dimension 0 may be larger than a page.
        """

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Prepares the step: turns `batch` into what `forward` reads, in buffers that the backend owns."""

    @abstractmethod
    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Writes the new keys and values into the pages, then attends.

        query is [T, num_heads, head_size], key and value [T, num_kv_heads, head_size], rotated already;
        head h reads key head h // (num_heads // num_kv_heads). Returns [T, num_heads, head_size] in query's
        dtype. `kv_cache` is the layer's tensor of `kv_cache_shape`.
        """


class RotatesAndWrites(AttentionBackend):
    """A backend that rotates queries and keys itself, in the pass that writes the pages. For other backends the host
    rotates with its operators and calls `forward`."""

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
    ) -> torch.Tensor:
        """Does what `forward` does, for queries and keys that are not rotated yet.

        Rotates query and key as `Operators.rotate` does, which defines cos and sin [T, 1, r]; both query and key are
        given up. All else is as for `forward`, capture in a graph included. The host calls it in place of `forward` for
        all layers with rotary positions.
        """


class AttendsLatents(AttentionBackend):
    """A backend whose pages may hold latent vectors. Backends that declare `latents` must be one."""

    @abstractmethod
    def latent_forward(
        self, layer: AttentionLayer, query: torch.Tensor, latent: torch.Tensor, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        """Writes the new latent vectors into the pages, then attends to them (DeepSeek-V2, section 2.1, with the
        up-projections of keys and values absorbed into queries and outputs).

        `AttentionSetup.spec` is a `LatentSpec`; the layer has one key head, and head_size = latent_size + rotary_size.
        query is [T, num_heads, head_size], already multiplied by the up-projection of the keys; latent is [T,
        head_size]. In both the rotary part comes last and is rotated. All heads read the same vectors: weights are the
        softmax of scale * query . latent over the positions that a query sees. Returns [T, num_heads, latent_size] in
        query's dtype, the weighted sums of the first latent_size elements. `kv_cache` is the layer's tensor of
        `kv_cache_shape`, which is (num_blocks, block_size, head_size) unless the backend needs another one of as many
        bytes. All else is as for `forward`, capture in a graph included.
        """


class AttendsBothWays(AttentionBackend):
    """A backend for layers that are not causal and keep nothing. Backends that declare `bidirectional` must be one."""

    @abstractmethod
    def both_ways_forward(
        self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attends to the keys of the step: each query to all keys of its own request.

        query is [T, num_heads, head_size], key and value [T, num_kv_heads, head_size]; head h reads key head
        h // (num_heads // num_kv_heads). Returns [T, num_heads, head_size] in query's dtype. There is no cache:
        `kv_cache_shape` is not called. All else is as for `forward`.
        """


class MovesSlots(AttentionBackend):
    """A backend that copies keys and values of single tokens. Backends that declare `trees` must be one."""

    @abstractmethod
    def move_slots(self, kv_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies keys and values (or latent vectors) of single tokens: slot source[i] to slot target[i] (int64 [n]).

        The host calls it after a tree was verified, to bring the accepted path into consecutive slots. Read all sources
        before writing a target.
        """
