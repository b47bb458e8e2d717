"""The step plan of the `sdpa` backend: which rows share a call, where their keys lie, what masks them.

Requests with few query tokens (decode, verify, the tail of a prompt) are **short**: those with equally many query
tokens are sorted by length and share calls. The others are **long** and are cut into tiles of queries, each with just
the keys that it can see.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from dovetail.attention_backends.sdpa_shared import MIN_REQUESTS, MIN_TOKENS
from dovetail.attention_backends.shared_prefix import shared_prefixes
from dovetail.contracts.attention import AttentionBatch, AttentionLayer, AttentionSetup, Reach

MAX_SHORT_QUERY = 16
TILE = 256
ALIBI_TILE = 32
"""Queries per tile where each head has a mask of its own."""
CALL_COST_TOKENS = 512
"""Padding, in tokens, that costs as much as another call."""


def writes_out_scores(layer: AttentionLayer) -> bool:
    """See `LayerKind.writes_out_scores`."""
    return layer.soft_cap is not None or layer.sinks is not None


@dataclass(frozen=True)
class LayerKind:
    """What the plan of a layer depends on; layers of one kind share it."""

    num_heads: int
    reach: Reach
    alibi_slopes: tuple[float, ...] | None
    writes_out_scores: bool
    """Whether soft cap or sinks apply to the scores, which torch's own function keeps to itself."""

    @property
    def sees_all(self) -> bool:
        """Whether scores are plain and only later positions are hidden."""
        return self.reach.is_all and self.alibi_slopes is None and not self.writes_out_scores

    def mask_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """dtype of what is added to the scores. 0 and -inf are exact in any, but a bias needs float32 at least."""
        is_wide = self.alibi_slopes is not None and dtype != torch.float64
        return torch.float32 if is_wide else dtype

    @classmethod
    def of(cls, layer: AttentionLayer) -> LayerKind:
        return cls(layer.num_heads, layer.reach, layer.alibi_slopes, writes_out_scores(layer))


@dataclass(frozen=True)
class KeySource:
    """Where the keys and values of one call lie in the cache."""

    blocks: torch.Tensor
    """int64 [n * pages]: pages to gather."""
    pages: torch.Tensor
    """[n * pages, block_size, parts, num_kv_heads, head_size]: the part of the gather buffer that takes them."""
    gathered: tuple[torch.Tensor, torch.Tensor]
    """Keys and values in `pages` that take part, each [n, num_kv_heads, tokens, head_size]."""
    run: slice | None
    """The slots that hold those tokens, where one request's pages lie one after another."""
    stale: torch.Tensor | None = None
    """int64: which tokens of `pages` no request of the call has written. They are masked, but what a former owner of
    the page has left may be NaN, which a weight of 0 does not keep out."""

    def read(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each [n, num_kv_heads, tokens, head_size]: views of the cache or of the gather buffer."""
        if self.run is not None and kv_cache.is_contiguous():
            return split_tokens(kv_cache.view(-1, *kv_cache.shape[2:])[None, self.run])
        torch.index_select(kv_cache, 0, self.blocks, out=self.pages)
        if self.stale is not None:
            self.pages.flatten(0, 1).index_fill_(0, self.stale, 0)
        return self.gathered


def split_tokens(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, tokens, parts, num_kv_heads, head_size] -> keys and values, each [n, num_kv_heads, tokens, head_size]. Of
    latent vectors there is one part, which is both."""
    parts = tokens.transpose(1, 3).unbind(2)
    return parts[0], parts[-1]


def token_shape(setup: AttentionSetup) -> tuple[int, int, int]:
    """(parts, num_kv_heads, head_size): what a page holds of a token. The parts are key and value, or a latent
    vector."""
    return (2 if setup.latent is None else 1, setup.spec.num_kv_heads, setup.spec.head_size)


@dataclass(frozen=True)
class ShortCall:
    """Requests with equally many query tokens, attended in one call."""

    rows: slice | torch.Tensor
    """Their query tokens in the step: all of the first request, all of the second, ..."""
    num_requests: int
    query_len: int
    source: KeySource
    mask: torch.Tensor | None
    """Added to the scores [n, num_kv_heads, query_len * group, tokens]."""


@dataclass(frozen=True)
class SharedCall:
    """Short requests with a common prefix, each with a rest of its own."""

    prefix: KeySource
    """The common pages: every query token sees all of them."""
    rest: ShortCall


@dataclass(frozen=True)
class Tile:
    """Some query tokens of a long request, and the keys that they see."""

    rows: slice
    keys: slice
    mask: torch.Tensor | None
    """Added to the scores [num_heads, queries, keys]. None: the causal rule over as many keys as queries."""


@dataclass(frozen=True)
class LongRequest:
    """A request with many query tokens."""

    fresh: slice | None
    """Its rows, where this step computes all its keys, which then are not read back from the cache."""
    source: KeySource
    tiles: list[Tile]


@dataclass(frozen=True)
class KindPlan:
    """All calls of one layer of a kind."""

    shared_calls: list[SharedCall]
    short_calls: list[ShortCall]
    long_requests: list[LongRequest]
    is_one_short_call: bool
    """Whether one short call attends all rows of the step in their order."""


class Buffer:
    """Memory that grows to the largest step and is handed out piece by piece."""

    def __init__(self, dtype: torch.dtype):
        self._memory = torch.empty(0, dtype=dtype)
        self._used = 0

    def reset(self) -> None:
        """Frees all pieces."""
        self._used = 0

    def take(self, *shape: int) -> torch.Tensor:
        """Returns an uninitialised piece of this shape, which is valid until `reset`."""
        size = math.prod(shape)
        if self._used + size > self._memory.numel():
            # Pieces handed out before keep the old memory alive. Outside of inference mode, so that the
            # buffer may be written in any mode later.
            with torch.inference_mode(False):
                self._memory = torch.empty(2 * (self._used + size), dtype=self._memory.dtype)
            self._used = 0
        piece = self._memory[self._used : self._used + size].view(shape)
        self._used += size
        return piece


class TileMasks:
    """Masks of tiles. They depend on key position minus query position alone, so all are cut from one matrix."""

    def __init__(self, kind: LayerKind, dtype: torch.dtype):
        self.kind = kind
        self.tile = TILE if kind.alibi_slopes is None else ALIBI_TILE
        self._dtype = kind.mask_dtype(dtype)
        self._reach = -1
        self._matrix = torch.empty(0)

    def cut(self, first_query: int, num_queries: int, keys: slice) -> torch.Tensor:
        """Mask of the queries at positions first_query .. over the keys at positions keys.start .. keys.stop - 1."""
        if first_query - keys.start > self._reach:
            with torch.inference_mode(False):
                self._grow(2 * (first_query - keys.start))
        origin = self._reach - first_query
        return self._matrix[..., :num_queries, origin + keys.start : origin + keys.stop]

    def _grow(self, reach: int) -> None:
        self._reach = reach
        distance = torch.arange(-reach, self.tile)[None, :] - torch.arange(self.tile)[:, None]
        is_hidden = distance > 0
        window = self.kind.reach.window  # no tile reaches beyond a chunk
        if window is not None:
            is_hidden |= distance <= -window
        if self.kind.alibi_slopes is None:
            bias = torch.zeros(distance.shape, dtype=self._dtype)
        else:
            slopes = torch.tensor(self.kind.alibi_slopes, dtype=self._dtype)
            bias = (slopes[:, None, None] * distance)[None]
        self._matrix = bias.masked_fill_(is_hidden, -torch.inf)


def split_by_length(lengths: np.ndarray, budget: int) -> Iterator[slice]:
    """Cuts lengths, sorted in falling order, into calls: each padded to its longest, of at most `budget` padded tokens
    (one request at least), and with no more padding than a call of its own would cost."""
    start = 0
    while start < len(lengths):
        remaining = len(lengths) - start
        most = max(1, budget // int(lengths[start]))
        count = -(-remaining // -(-remaining // most))
        padding = np.cumsum(lengths[start] - lengths[start : start + count])
        count = int(np.searchsorted(padding, CALL_COST_TOKENS, side="right"))
        yield slice(start, start + count)
        start += count


class Planner:
    """Makes the plans of one kind of layer."""

    def __init__(self, kind: LayerKind, setup: AttentionSetup, budget_tokens: int):
        self.kind = kind
        self.block_size = setup.block_size
        self.page_shape = (setup.block_size, *token_shape(setup))
        self.num_kv_heads = setup.spec.num_kv_heads
        self.budget_tokens = budget_tokens
        dtype: torch.dtype = getattr(torch, setup.dtype)
        self._masks = Buffer(kind.mask_dtype(dtype))
        self._tile_masks = TileMasks(kind, dtype)

    def plan(self, batch: AttentionBatch, gathered: Buffer) -> KindPlan:
        """The calls for `batch`. All sources share the start of `gathered`, since calls run one after another."""
        self._masks.reset()
        query_lens = np.diff(batch.query_start)
        is_short = query_lens <= MAX_SHORT_QUERY
        is_short[list(batch.tree_masks)] = True
        first_keys = self.kind.reach.first_keys((batch.seq_lens - query_lens).astype(np.int64))
        shared_calls: list[SharedCall] = []
        short_calls: list[ShortCall] = []
        for query_len in map(int, np.unique(query_lens[is_short])):
            requests = np.flatnonzero(is_short & (query_lens == query_len))
            if self.kind.sees_all:
                for shared in shared_prefixes(batch, requests, self.block_size, MIN_REQUESTS, MIN_TOKENS):
                    requests = np.setdiff1d(requests, shared.members, assume_unique=True)
                    prefix = self._prefix(batch.block_table[shared.members[0], : shared.num_blocks], gathered)
                    starts = np.full(len(query_lens), shared.num_blocks * self.block_size)
                    rests = self._short_calls(batch, shared.members, starts, query_len, gathered)
                    shared_calls += [SharedCall(prefix, rest) for rest in rests]
            short_calls += self._short_calls(batch, requests, first_keys, query_len, gathered)
        long_requests = [
            self._long_request(batch, int(request), int(first_keys[request]), gathered)
            for request in np.flatnonzero(~is_short)
        ]
        calls = len(short_calls) + len(shared_calls) + len(long_requests)
        is_one_call = calls == 1 and bool(short_calls) and isinstance(short_calls[0].rows, slice)
        return KindPlan(shared_calls, short_calls, long_requests, is_one_call)

    def _short_calls(
        self, batch: AttentionBatch, requests: np.ndarray, first_keys: np.ndarray, query_len: int, gathered: Buffer
    ) -> Iterator[ShortCall]:
        """Calls for requests with equally many query tokens, over the keys from first_keys[request] on."""
        lengths = batch.seq_lens[requests] - first_keys[requests]
        order = np.argsort(-lengths, kind="stable")
        for part in split_by_length(lengths[order], self.budget_tokens):
            chosen = requests[order[part]]
            yield self._short_call(batch, chosen, first_keys[chosen], query_len, gathered)

    def _prefix(self, block_table: np.ndarray, gathered: Buffer) -> KeySource:
        """The source of whole pages."""
        blocks = block_table.astype(np.int64)
        run = None
        if bool((np.diff(blocks) == 1).all()):
            run = slice(int(blocks[0]) * self.block_size, (int(blocks[-1]) + 1) * self.block_size)
        gathered.reset()
        pages = gathered.take(len(blocks), *self.page_shape)
        views = split_tokens(pages.view(1, -1, *self.page_shape[1:]))
        return KeySource(torch.from_numpy(blocks), pages, views, run)

    def _source(
        self, batch: AttentionBatch, requests: np.ndarray, first_keys: np.ndarray, gathered: Buffer
    ) -> tuple[KeySource, np.ndarray]:
        """The source of the keys first_keys[i] .. of each request, and the position of each request's first one."""
        first_blocks = first_keys // self.block_size
        starts = first_blocks * self.block_size
        num_blocks = -(-batch.seq_lens[requests] // self.block_size) - first_blocks
        # Shorter requests repeat their last page.
        columns = first_blocks[:, None] + np.minimum(np.arange(num_blocks.max()), num_blocks[:, None] - 1)
        blocks = batch.block_table[requests[:, None], columns].astype(np.int64)
        lengths = batch.seq_lens[requests] - starts
        skipped = first_keys - starts
        is_aligned = bool((skipped == skipped[0]).all())
        keys = slice(int(skipped[0]) if is_aligned else 0, int(lengths.max()))
        run = None
        if len(requests) == 1 and bool((np.diff(blocks[0]) == 1).all()):
            slot = int(blocks[0, 0]) * self.block_size
            run = slice(slot + keys.start, slot + keys.stop)
        gathered.reset()
        pages = gathered.take(blocks.size, *self.page_shape)
        views = split_tokens(pages.view(len(requests), -1, *self.page_shape[1:])[:, keys])
        tokens = np.arange(columns.shape[1] * self.block_size)
        stale = np.flatnonzero((tokens >= lengths[:, None]) & (tokens < keys.stop))
        source = KeySource(
            torch.from_numpy(blocks.reshape(-1)), pages, views, run, torch.from_numpy(stale) if len(stale) else None
        )
        return source, starts + keys.start

    def _short_call(
        self, batch: AttentionBatch, requests: np.ndarray, first_keys: np.ndarray, query_len: int, gathered: Buffer
    ) -> ShortCall:
        source, starts = self._source(batch, requests, first_keys, gathered)
        num_keys = source.gathered[0].shape[2]
        rows = (batch.query_start[requests][:, None] + np.arange(query_len)).reshape(-1).astype(np.int64)
        is_range = bool((np.diff(rows) == 1).all())
        return ShortCall(
            slice(int(rows[0]), int(rows[-1]) + 1) if is_range else torch.from_numpy(rows),
            len(requests),
            query_len,
            source,
            self._short_mask(batch, requests, starts, first_keys, query_len, num_keys),
        )

    def _short_mask(
        self,
        batch: AttentionBatch,
        requests: np.ndarray,
        starts: np.ndarray,
        first_keys: np.ndarray,
        query_len: int,
        num_keys: int,
    ) -> torch.Tensor | None:
        """starts: position of the first key of each request."""
        ends = batch.seq_lens[requests] - starts
        if (
            query_len == 1
            and self.kind.alibi_slopes is None
            and (ends == num_keys).all()
            and (starts == first_keys).all()
        ):
            return None
        key_positions = starts[:, None] + np.arange(num_keys)
        query_positions = (batch.seq_lens[requests] - query_len)[:, None] + np.arange(query_len)
        is_seen = key_positions[:, None, :] <= query_positions[:, :, None]
        for index, request in enumerate(requests):
            tree = batch.tree_masks.get(int(request))
            if tree is not None:
                own = slice(int(ends[index]) - query_len, int(ends[index]))
                is_seen[index, :, : own.start] = True
                is_seen[index, :, own] = tree
                is_seen[index, :, own.stop :] = False
                # The position of a tree's token is the one that it has if its path is accepted: its depth, not its
                # slot.
                query_positions[index] = int(query_positions[index, 0]) + tree.sum(axis=1) - 1
                key_positions[index, own] = query_positions[index]
        is_seen &= key_positions[:, None, :] >= self.kind.reach.first_keys(query_positions)[:, :, None]
        if self.kind.alibi_slopes is None:
            return self._short_bias(torch.from_numpy(~is_seen), None)
        distance = key_positions[:, None, :] - query_positions[:, :, None]
        return self._short_bias(torch.from_numpy(~is_seen), torch.from_numpy(distance))

    def _short_bias(self, is_hidden: torch.Tensor, distance: torch.Tensor | None) -> torch.Tensor:
        """[n, query_len, tokens], twice -> what ShortCall.mask adds. Only ALiBi reads `distance`."""
        num_requests, query_len, num_keys = is_hidden.shape
        group = self.kind.num_heads // self.num_kv_heads
        if self.kind.alibi_slopes is None or distance is None:
            # With one query token, all heads of a group have the same mask.
            rows = 1 if query_len == 1 else group
            bias = self._masks.take(num_requests, 1, query_len, rows, num_keys).zero_()
        else:
            bias = self._masks.take(num_requests, self.num_kv_heads, query_len, group, num_keys)
            slopes = torch.tensor(self.kind.alibi_slopes, dtype=bias.dtype).view(self.num_kv_heads, 1, group, 1)
            torch.mul(slopes, distance[:, None, :, None, :], out=bias)
        bias.masked_fill_(is_hidden[:, None, :, None, :], -torch.inf)
        return bias.flatten(2, 3)

    def _long_request(self, batch: AttentionBatch, request: int, first_key: int, gathered: Buffer) -> LongRequest:
        rows = slice(int(batch.query_start[request]), int(batch.query_start[request + 1]))
        seq_len = int(batch.seq_lens[request])
        source, _ = self._source(batch, np.array([request]), np.array([first_key]), gathered)
        num_cached = seq_len - (rows.stop - rows.start)
        is_fresh = num_cached == 0
        is_plain = self.kind.alibi_slopes is None and not self.kind.writes_out_scores
        sees_all = self.kind.reach.first_key(seq_len - 1) == 0
        if is_fresh and is_plain and sees_all:
            tiles = [Tile(rows, slice(0, seq_len), None)]
        else:
            tiles = list(self._tiles(rows, num_cached, first_key))
        return LongRequest(rows if is_fresh else None, source, tiles)

    def _tiles(self, rows: slice, num_cached: int, first_key: int) -> Iterator[Tile]:
        """Tiles of a request whose source starts at key position `first_key`; all queries of a tile are of one
        chunk."""
        num_rows, reach = rows.stop - rows.start, self.kind.reach
        stop = 0
        while stop < num_rows:
            start, first_query = stop, num_cached + stop
            stop = min(start + self._tile_masks.tile, num_rows)
            if reach.chunk is not None:
                stop = min(stop, start + reach.chunk - first_query % reach.chunk)
            keys = slice(reach.first_key(first_query), num_cached + stop)
            mask = self._tile_masks.cut(first_query, stop - start, keys)
            tile_rows = slice(rows.start + start, rows.start + stop)
            yield Tile(tile_rows, slice(keys.start - first_key, keys.stop - first_key), mask)
