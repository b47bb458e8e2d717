"""Random steps for attention backends, with the results of brute force.

A case knows its keys and values by request and position, apart from any page, so the expected output does not
depend on the backend under test. Pages are filled through the backend's own `forward`. Slots that no token has
filled hold large finite junk; pages that must not be read hold NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dovetail.contracts.attention import AttentionBackend, AttentionBatch, AttentionLayer, AttentionSetup
from dovetail.contracts.kv import KVSpec


@dataclass(frozen=True)
class CaseShape:
    """Parameters of a random case; None: drawn at random."""

    dtype: str = "float32"
    device: str = "cpu"
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
    """(new, cached) tokens of each request."""
    num_kv_heads: int | None = None


@dataclass(frozen=True)
class CaseRequest:
    """One request: all its keys and values, the last `query_len` of them new in the step."""

    query: torch.Tensor
    """[query_len, num_heads, head_size]"""
    keys: torch.Tensor
    """[seq_len, num_kv_heads, head_size]"""
    values: torch.Tensor
    block_ids: tuple[int, ...]
    num_shared: int
    """Leading tokens whose pages an earlier request of the case has filled."""
    tree: np.ndarray | None

    @property
    def query_len(self) -> int:
        return len(self.query)

    @property
    def seq_len(self) -> int:
        return len(self.keys)

    @property
    def num_cached(self) -> int:
        return self.seq_len - self.query_len

    def block_row(self, block_size: int, window: int | None) -> list[int]:
        """Its row of the block table: 0 for pages that the window has freed."""
        oldest = 0 if window is None else max(0, self.num_cached - window + 1)
        return [block if (j + 1) * block_size > oldest else 0 for j, block in enumerate(self.block_ids)]


@dataclass(frozen=True)
class AttentionCase:
    """One step over requests with a past."""

    setup: AttentionSetup
    num_blocks: int
    requests: tuple[CaseRequest, ...]
    layer_index: int = 0
    """Index of the case's layer in the setup."""

    @property
    def layer(self) -> AttentionLayer:
        return self.setup.layers[self.layer_index]

    def batch(self) -> AttentionBatch:
        """Returns the step's batch, in new arrays."""
        return make_batch(
            [
                (request.block_row(self.setup.block_size, self.setup.spec.window), request.num_cached, request.seq_len)
                for request in self.requests
            ],
            self.setup,
            {index: request.tree.copy() for index, request in enumerate(self.requests) if request.tree is not None},
        )

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value of the step, flat over requests."""
        new = [(r.query, r.keys[r.num_cached :], r.values[r.num_cached :]) for r in self.requests]
        query, key, value = (torch.cat(parts).to(self.setup.device) for parts in zip(*new, strict=True))
        return query, key, value

    def with_inputs(self, query: torch.Tensor, key: torch.Tensor) -> AttentionCase:
        """The case with these queries and new keys, flat over requests."""
        sizes = [request.query_len for request in self.requests]
        new = zip(self.requests, torch.split(query.cpu(), sizes), torch.split(key.cpu(), sizes), strict=True)
        return replace(
            self,
            requests=tuple(
                replace(request, query=queries, keys=torch.cat((request.keys[: request.num_cached], keys)))
                for request, queries, keys in new
            ),
        )

    def make_cache(self, backend: AttentionBackend, padding: int = 0) -> torch.Tensor:
        """A cache as the host makes it; `padding` elements lie between its pages."""
        shape = backend.kv_cache_shape(self.num_blocks)
        page = math.prod(shape[1:])
        dtype = getattr(torch, self.setup.spec.dtype)
        storage = torch.zeros(self.num_blocks, page + padding, dtype=dtype, device=self.setup.device)
        strides = [math.prod(shape[axis + 1 :]) for axis in range(1, len(shape))]
        return storage.as_strided(shape, (page + padding, *strides))

    def write_past(self, backend: AttentionBackend, kv_cache: torch.Tensor) -> None:
        """Fills the pages with the past of all requests, in chunks, through the backend itself. Slots that no request
        has written hold NaN, in pages of theirs too: a former owner may have left it there."""
        unreadable = unreadable_number(kv_cache.dtype)
        kv_cache.fill_(unreadable)
        for request in self.requests:
            middle = (request.num_shared + request.num_cached) // 2
            for start, stop in ((request.num_shared, middle), (middle, request.num_cached)):
                if stop > start:
                    backend.plan(make_batch([(list(request.block_ids), start, stop)], self.setup))
                    key, value = request.keys[start:stop], request.values[start:stop]
                    query = torch.zeros(stop - start, self.layer.num_heads, self.layer.head_size, dtype=key.dtype)
                    device = self.setup.device
                    self.forward(backend, query.to(device), key.to(device), value.to(device), kv_cache)
        block_size, window = self.setup.block_size, self.setup.spec.window
        readable = {block for request in self.requests for block in request.block_row(block_size, window)}
        freed = sorted(set(range(self.num_blocks)) - (readable - {0}))
        kv_cache[torch.tensor(freed, device=kv_cache.device)] = unreadable

    def filled_cache(self, backend: AttentionBackend, padding: int = 0) -> torch.Tensor:
        """Returns a cache that holds the past."""
        kv_cache = self.make_cache(backend, padding)
        self.write_past(backend, kv_cache)
        return kv_cache

    def run(self, backend: AttentionBackend, kv_cache: torch.Tensor) -> torch.Tensor:
        """Runs the step over a cache that holds the past; returns [T, num_heads, head_size]."""
        backend.plan(self.batch())
        return self.forward(backend, *self.inputs(), kv_cache)

    def forward(
        self,
        backend: AttentionBackend,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Calls the backend as the host does, after its `plan`."""
        return backend.forward(self.layer, query, key, value, kv_cache)

    def run_from_scratch(self, backend: AttentionBackend, padding: int = 0) -> torch.Tensor:
        """Makes a cache, fills it and runs the step."""
        return self.run(backend, self.filled_cache(backend, padding))

    def expected(self) -> torch.Tensor:
        """Returns the contract's result, computed pair by pair in float64: [T, num_heads, head_size]."""
        return torch.from_numpy(np.concatenate([brute_force(self.layer, request) for request in self.requests]))


def as_cached(vectors: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    """[..., head_size] as pages of `kv_dtype` give it back. int8: to the nearest of 127 steps up to the largest
    absolute value of each vector, in multiples of a float16 scale."""
    if kv_dtype != "int8":
        return vectors.to(getattr(torch, kv_dtype)).to(vectors.dtype)
    scale = (vectors.abs().amax(-1, keepdim=True).float() / 127).to(torch.float16).to(vectors.dtype)
    return (vectors / scale).round().clamp(-127, 127) * scale


def keys_as_cached(keys: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    """As `as_cached`, of keys: those of int8 pages are turned before they are rounded, as `SCALE_BYTES` says. float32
    where that is so."""
    return as_cached(keys, kv_dtype) if kv_dtype != "int8" else turned(as_cached(turned(keys), kv_dtype))


def turned(vectors: torch.Tensor) -> torch.Tensor:
    """float32 [..., head_size], turned as keys of int8 pages and the queries that meet them; its own inverse."""
    run = min(64, vectors.shape[-1] & -vectors.shape[-1])
    vectors = vectors.float()
    half = 1
    while half < run:
        first, second = vectors.reshape(*vectors.shape[:-1], -1, 2, half).unbind(-2)
        vectors = torch.stack((first + second, first - second), -2).flatten(-3)
        half *= 2
    return vectors * float(1 / np.sqrt(np.float32(run)))


def unreadable_number(dtype: torch.dtype) -> float:
    """What pages hold that must not be read: NaN; in an int8 page, the bytes of a scale that is NaN."""
    return torch.nan if dtype.is_floating_point else -1


def make_batch(
    rows: Sequence[tuple[Sequence[int], int, int]],
    setup: AttentionSetup,
    tree_masks: dict[int, np.ndarray] | None = None,
) -> AttentionBatch:
    """A batch from (block ids, cached tokens, tokens after the step) of each request."""
    block_size = setup.block_size
    block_table = np.zeros((len(rows), -(-setup.max_model_len // block_size)), dtype=np.int32)
    slots = []
    for index, (block_ids, num_cached, seq_len) in enumerate(rows):
        block_table[index, : -(-seq_len // block_size)] = block_ids[: -(-seq_len // block_size)]
        positions = np.arange(num_cached, seq_len)
        slots.append(block_table[index, positions // block_size] * block_size + positions % block_size)
    query_lens = np.array([seq_len - num_cached for _, num_cached, seq_len in rows], dtype=np.int32)
    seq_lens = np.array([seq_len for _, _, seq_len in rows], dtype=np.int32)
    return AttentionBatch(
        query_start=np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
        seq_lens=seq_lens,
        block_table=block_table,
        slot_mapping=np.concatenate(slots).astype(np.int64),
        max_query_len=int(query_lens.max()),
        max_seq_len=int(seq_lens.max()),
        tree_masks=tree_masks or {},
    )


def brute_force(layer: AttentionLayer, request: CaseRequest) -> np.ndarray:
    """Attention of one request, one query token and head at a time, in float64: [query_len, num_heads, head_size]."""
    query, keys, values = (x.to(torch.float64).numpy() for x in (request.query, request.keys, request.values))
    return attended_by_pairs(layer, request, query, keys, values)


def attended_by_pairs(
    layer: AttentionLayer, request: CaseRequest, query: np.ndarray, keys: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """Attention of query [query_len, num_heads, size] to keys [seq_len, num_kv_heads, size] and values [seq_len,
    num_kv_heads, value size]: [query_len, num_heads, value size]. Of `request`, what queries see."""
    group, positions = layer.num_heads // keys.shape[1], _positions(request)
    output = np.zeros((*query.shape[:2], values.shape[2]))
    for i in range(request.query_len):
        seen = _seen(layer, request, positions, i)
        distances = positions[seen] - positions[request.num_cached + i]
        for head in range(layer.num_heads):
            scores = keys[seen, head // group] @ query[i, head] * layer.scale
            if layer.soft_cap is not None:
                scores = layer.soft_cap * np.tanh(scores / layer.soft_cap)
            if layer.alibi_slopes is not None:
                scores = scores + layer.alibi_slopes[head] * distances
            sink = -np.inf if layer.sinks is None else float(layer.sinks[head])
            highest = max(scores.max(), sink)
            weights = np.exp(scores - highest)
            output[i, head] = weights / (weights.sum() + np.exp(sink - highest)) @ values[seen, head // group]
    return output


def _positions(request: CaseRequest) -> np.ndarray:
    """Position of each key: of a tree's token, the cached tokens and its ancestors come before it."""
    positions = np.arange(request.seq_len)
    if request.tree is not None:
        positions[request.num_cached :] = request.num_cached + request.tree.sum(axis=1) - 1
    return positions


def _seen(layer: AttentionLayer, request: CaseRequest, positions: np.ndarray, i: int) -> np.ndarray:
    """Which keys query token i sees, in ascending order."""
    if not layer.causal:
        return np.ones(len(positions), dtype=bool)
    own = request.num_cached + i
    seen = np.arange(len(positions)) <= own
    if request.tree is not None:
        seen[request.num_cached :] = request.tree[i]
    if layer.window is not None:
        seen &= positions > positions[own] - layer.window
    if layer.chunk is not None:
        seen &= positions // layer.chunk == positions[own] // layer.chunk
    return np.flatnonzero(seen)


def random_case(seed: int, shape: CaseShape) -> AttentionCase:
    """A case drawn from `seed`: lengths, page tables, head counts, shared prefixes, and the features of `shape`."""
    rng = np.random.default_rng(seed)
    if shape.lengths is not None:
        shape = replace(
            shape,
            max_requests=len(shape.lengths),
            max_cached=max(1, *(cached for _, cached in shape.lengths)),
            max_query=max(new for new, _ in shape.lengths),
        )
    block_size = shape.block_size or int(rng.choice([1, 8, 16, 32]))
    head_size = shape.head_size or int(rng.choice([8, 16, 24, 64]))
    num_kv_heads, group = int(rng.integers(1, 4)), int(rng.integers(1, 5))
    num_heads = num_kv_heads * group
    num_kv_heads = shape.num_kv_heads or num_kv_heads
    num_heads = -(-num_heads // num_kv_heads) * num_kv_heads  # whole groups, whatever the shape asks for
    layer = AttentionLayer(
        layer_id=int(rng.integers(0, 4)),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        scale=float(rng.uniform(0.5, 1.5)) * head_size**-0.5,
        window=int(rng.integers(1, shape.max_cached)) if shape.has_window and not shape.has_chunks else None,
        soft_cap=float(rng.uniform(0.5, 5.0)) if shape.has_soft_cap else None,
        alibi_slopes=tuple(2.0 ** (-8.0 * (h + 1) / num_heads) for h in range(num_heads)) if shape.has_alibi else None,
        # Caps above and below typical scores.
        sinks=torch.linspace(-4.0, 6.0, num_heads, device=shape.device) if shape.has_sinks else None,
        chunk=int(rng.integers(1, shape.max_cached)) if shape.has_chunks else None,
    )
    requests = _random_requests(rng, shape, layer, block_size)
    setup = AttentionSetup(
        layers=(layer,),
        spec=KVSpec(
            num_kv_heads=num_kv_heads, head_size=head_size, dtype=shape.dtype, window=layer.chunk or layer.window
        ),
        block_size=block_size,
        dtype=shape.dtype,
        device=shape.device,
        max_num_seqs=shape.max_requests,
        max_num_batched_tokens=shape.max_requests * (shape.max_cached + shape.max_query),
        max_model_len=shape.max_cached + shape.max_query,
    )
    num_blocks = 2 + max(block for request in requests for block in request.block_ids)
    return AttentionCase(setup, num_blocks, tuple(requests))


def _random_requests(
    rng: np.random.Generator, shape: CaseShape, layer: AttentionLayer, block_size: int
) -> list[CaseRequest]:
    num_requests = len(shape.lengths) if shape.lengths else int(rng.integers(1, shape.max_requests + 1))
    # Block 0 means "no page", so it is never allocated.
    most_blocks = num_requests * (-(-(shape.max_cached + shape.max_query) // block_size))
    free_blocks = [int(block) for block in 1 + rng.permutation(most_blocks)]
    if rng.random() < 0.25:
        free_blocks.sort(reverse=True)  # handed out in ascending order: pages that lie one after another
    requests: list[CaseRequest] = []
    for index in range(num_requests):
        query_len, num_cached, tree = (*shape.lengths[index], None) if shape.lengths else _random_lengths(rng, shape)
        query = _random_tensor(rng, shape, query_len, layer.num_heads, layer.head_size)
        keys = _random_tensor(rng, shape, query_len + num_cached, layer.num_kv_heads, layer.head_size)
        values = _random_tensor(rng, shape, query_len + num_cached, layer.num_kv_heads, layer.head_size)
        shared: tuple[int, ...] = ()
        if requests and rng.random() < 0.3:
            other = requests[int(rng.integers(len(requests)))]
            shared = other.block_ids[: min(num_cached, other.num_cached) // block_size]
            num_shared = len(shared) * block_size
            keys[:num_shared], values[:num_shared] = other.keys[:num_shared], other.values[:num_shared]
        own = tuple(free_blocks.pop() for _ in range(-(-len(keys) // block_size) - len(shared)))
        requests.append(CaseRequest(query, keys, values, shared + own, len(shared) * block_size, tree))
    return requests


def _random_lengths(rng: np.random.Generator, shape: CaseShape) -> tuple[int, int, np.ndarray | None]:
    """Query length, cached length and tree mask of a prefill, chunk, decode or verify request."""
    kind = rng.choice(["prefill", "chunk", "decode", "verify"])
    num_cached = 0 if kind == "prefill" else int(rng.integers(1, shape.max_cached + 1))
    if kind == "decode":
        return 1, num_cached, None
    if kind != "verify" or shape.max_query < 2:
        return int(rng.integers(1, shape.max_query + 1)), num_cached, None
    query_len = int(rng.integers(2, min(9, shape.max_query + 1)))
    return query_len, num_cached, random_tree(rng, query_len) if shape.has_trees else None


def random_tree(rng: np.random.Generator, num_tokens: int) -> np.ndarray:
    """Mask of a random tree: each token sees itself and its ancestors. Token 0 is the root."""
    mask = np.eye(num_tokens, dtype=bool)
    for token in range(1, num_tokens):
        mask[token] |= mask[int(rng.integers(0, token))]
    return mask


def _random_tensor(rng: np.random.Generator, shape: CaseShape, *size: int) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, shape.dtype)
    return torch.from_numpy(rng.standard_normal(size)).to(dtype)
