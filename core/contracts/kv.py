"""What a layer caches, how many bytes a page of it takes, and which layers share a block table.

A KV **block** (page) holds the keys and values of `block_size` consecutive tokens of one request in one layer. Layers
whose pages have the same lifetime form a **group**: they share one block table per request. Full attention keeps every
page while the request lives; a sliding window of W frees the pages that no later query can see.
"""

from __future__ import annotations

from dataclasses import dataclass, field

DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes per element of each dtype that contracts name, in torch's spelling."""

SCALE_BYTES: dict[str, int] = {"int8": 2}
"""KV dtypes whose pages hold, for each token, head and key or value, a float16 scale with the elements.

With int8, keys are rotated before they are rounded: runs of r elements are multiplied by the orthonormal Hadamard
matrix, where r is the largest power of two, up to 64, that divides the head size. Backends rotate queries in the same
way, which changes no product. A few channels of keys are much larger than the others; the rotation spreads them over
all elements, so that one scale serves all."""


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """Keys and values of one attention layer, on one tensor-parallel rank."""

    num_kv_heads: int
    head_size: int
    dtype: str
    window: int | None = None
    """Sliding window: the query at position p sees positions p - window + 1 .. p. None: all of 0 .. p. For a layer that
    attends by chunks (`AttentionLayer.chunk`) it is the chunk: no query sees further back than that."""

    def page_bytes(self, block_size: int) -> int:
        """Bytes of one page: 2 (key, value) x block_size x num_kv_heads x (head_size x bytes per element + bytes of
        the scale, see `SCALE_BYTES`).

        Backends must lay pages out in exactly this many bytes; swap and memory estimates rely on it.
        """
        vector_bytes = self.head_size * DTYPE_BYTES[self.dtype] + SCALE_BYTES.get(self.dtype, 0)
        return 2 * block_size * self.num_kv_heads * vector_bytes


@dataclass(frozen=True, kw_only=True)
class StateSpec:
    """A recurrent state of fixed size, one per request (Mamba, RWKV, linear attention)."""

    num_elements: int
    dtype: str

    def page_bytes(self, block_size: int) -> int:
        """Bytes of the state; it does not depend on the block size."""
        return self.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class LatentSpec(KVSpec):
    """One latent vector per token, from which keys and values of all heads are computed, and a rotated key that they
    share (multi-head latent attention; DeepSeek-V2, section 2.1). Every tensor-parallel rank keeps all of it.

    To an attention backend this is one key head, whose first `latent_size` elements are the value as well: there is
    nothing else in a page. Queries see all positions up to their own. Pages of int8 and fp8 are refused.
    """

    latent_size: int
    rotary_size: int
    """Elements of the shared key, after the latent ones."""
    dtype: str
    num_kv_heads: int = field(init=False, default=1)
    head_size: int = field(init=False)
    """latent_size + rotary_size."""
    window: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_size", self.latent_size + self.rotary_size)

    def page_bytes(self, block_size: int) -> int:
        """Bytes of one page: block_size x (latent_size + rotary_size) x bytes per element."""
        return block_size * self.head_size * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class CrossSpec:
    """Reserved: keys and values of an encoder's output, written once per request and then only read (cross attention of
    Whisper, T5). The host refuses layers that declare it."""

    num_kv_heads: int
    head_size: int
    dtype: str
    max_tokens: int
    """Most tokens of an encoder's output."""

    def page_bytes(self, block_size: int) -> int:
        """Bytes of one page, as `KVSpec.page_bytes`."""
        spec = KVSpec(num_kv_heads=self.num_kv_heads, head_size=self.head_size, dtype=self.dtype)
        return spec.page_bytes(block_size)


LayerCache = KVSpec | StateSpec | LatentSpec | CrossSpec
"""What one layer caches between steps. A layer that caches nothing declares no spec."""


@dataclass(frozen=True)
class KVGroup:
    """Layers that share one block table per request."""

    group_id: int
    layer_ids: tuple[int, ...]
    """Ids of the layers in the order in which the model registered them."""
    window: int | None
    """Pages whose last token is further back than this are freed; None keeps all."""


@dataclass(frozen=True)
class ExtraTensors:
    """KV tensors of attention layers that are not the model's own, one tensor per layer: those of one drafter."""

    owner: str
    """The drafter's name in the config."""
    group_id: int
    """Group whose block tables the layers use; it keeps all pages."""
    page_bytes: tuple[int, ...]
    """Bytes of one page of each layer."""


@dataclass(frozen=True)
class KVLayout:
    """How the KV memory of one engine is cut up: made once, from the model's layers and the cache config.

    All groups draw from one pool of `num_blocks` block ids. Layer i of each group shares KV tensor i, so a block id
    used by one group is never used by another at the same time. Layers that are not the model's own (a drafter's) have
    KV tensors of their own and no block tables: they use those of a group of the model. Only the rank that answers has
    such tensors.
    """

    block_size: int
    groups: tuple[KVGroup, ...]
    """None for a model that keeps nothing (`ModelSize.is_encoder`): there are no pages then."""
    page_bytes: int
    """Bytes of one page of one KV tensor that groups share: the largest page of any layer."""
    num_tensors: int
    """KV tensors that groups share: the layers of the largest group."""
    extra_tensors: tuple[ExtraTensors, ...] = ()
    """One entry per owner (drafter) of layers that are not the model's own."""

    @property
    def block_bytes(self) -> int:
        """Bytes that one block id costs: a page in each KV tensor, the extra ones included."""
        return self.page_bytes * self.num_tensors + self.extra_bytes

    @property
    def extra_bytes(self) -> int:
        """Bytes of each block in the extra KV tensors."""
        return sum(sum(tensors.page_bytes) for tensors in self.extra_tensors)

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks of one group that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)
