"""The step plan of the Triton kernels, in numpy: which query tokens form a tile, over which keys, in how many parts.

A **tile** is some tokens of one request with all query heads of a key head. An **item** is a tile over a range of its
keys. Where there are fewer tiles than the device could work on, their keys are cut into several items, whose results
are **parts** that `merge_parts` puts together. The number of items is bounded by the counts of requests and tokens
alone (`max_tiles`), so grids need not change with the lengths. Tiles of several requests, over keys that they share,
come from `sharing.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dovetail.contracts.attention import AttentionBatch

SPLIT_ALIGN = 128
"""Key ranges are cut at multiples of this, which every BLOCK_N divides."""
MIN_SPLIT = 256
"""Keys below which a range is not cut: putting parts together would cost more."""
RUN = 512
"""Keys that are summed by themselves where a row's bits must not depend on the rest of the step. Ranges are cut at
multiples of it, so that a part is one run."""
SHARED = 1 << 30
"""In place of the keys before the query, for an item of several requests: more than any sequence has, so that all of
its keys are before all queries."""


@dataclass(frozen=True)
class Rows:
    """The requests of a step that go through one launch."""

    requests: np.ndarray
    """int64: their indices in the batch, ascending."""
    num_tokens: int

    @property
    def is_empty(self) -> bool:
        return len(self.requests) == 0


def split_rows(batch: AttentionBatch, max_short: int) -> tuple[Rows, Rows]:
    """Short rows (queries of at most `max_short` tokens, and all trees) and long ones."""
    query_lens = np.diff(batch.query_start)
    is_short = query_lens <= max_short
    if batch.tree_masks:
        is_short[list(batch.tree_masks)] = True
    if is_short.all():
        none = np.zeros(0, dtype=np.int64)
        return Rows(np.arange(len(query_lens)), int(batch.query_start[-1])), Rows(none, 0)
    short, long = np.flatnonzero(is_short), np.flatnonzero(~is_short)
    return Rows(short, int(query_lens[short].sum())), Rows(long, int(query_lens[long].sum()))


def max_tiles(rows: Rows, tokens_per_tile: int) -> int:
    """Most tiles that as many requests with as many tokens in all can have."""
    return min(rows.num_tokens, rows.num_tokens // tokens_per_tile + len(rows.requests))


def token_records(batch: AttentionBatch, out: np.ndarray, tree: np.ndarray) -> int:
    """Fills `out` [T, 4] (see kernels.py) and the masks of all trees into `tree` (uint8); returns their bytes.

    The position of a tree's token is its depth, not its slot.
    """
    num_tokens = int(batch.query_start[-1])
    query_lens = np.diff(batch.query_start)
    out[:num_tokens, 0] = batch.slot_mapping
    starts = batch.seq_lens - query_lens - batch.query_start[:-1]
    if len(starts) == num_tokens:
        out[:num_tokens, 1] = batch.seq_lens - 1
    else:
        out[:num_tokens, 1] = np.repeat(starts, query_lens) + np.arange(num_tokens, dtype=np.int32)
    out[:num_tokens, 2] = -1
    size = 0
    for index, mask in batch.tree_masks.items():
        rows = slice(int(batch.query_start[index]), int(batch.query_start[index + 1]))
        count = rows.stop - rows.start
        out[rows, 1] = batch.seq_lens[index] - count + mask.sum(axis=1) - 1
        out[rows, 2] = size + np.arange(count) * count
        tree[size : size + mask.size] = mask.reshape(-1)
        size += mask.size
    return size


@dataclass(frozen=True)
class Tiles:
    """Tiles of one launch, each with the range of keys that some row of it sees: empty where all rows only fill up."""

    request: np.ndarray
    """int32, as the rest: index in the batch."""
    first_token: np.ndarray
    count: np.ndarray
    first_key: np.ndarray
    end_key: np.ndarray


def written_ends(batch: AttentionBatch, block_size: int) -> np.ndarray:
    """int32 [R]: end of the keys in pages of each request's own.

    The keys of tokens that fill up a graph are in block 0. At their places in a sequence is what a former owner of the
    page has left, and a NaN among that would go through a weight of 0 into the rows of real tokens.
    """
    if not batch.is_for_graph or len(batch.seq_lens) == 0:
        return batch.seq_lens
    is_filler = batch.slot_mapping < block_size
    return batch.seq_lens - np.add.reduceat(is_filler, batch.query_start[:-1], dtype=np.int32)


def create_tiles(
    batch: AttentionBatch, rows: Rows, tokens_per_tile: int, window: int | None, key_ends: np.ndarray
) -> Tiles:
    """Cuts the queries of `rows` into tiles of at most `tokens_per_tile` tokens. `key_ends`: `written_ends`."""
    starts, ends = batch.query_start[rows.requests], batch.query_start[rows.requests + 1]
    num_cached = batch.seq_lens[rows.requests] - (ends - starts)
    counts = -(-(ends - starts) // tokens_per_tile)
    if len(rows.requests) == rows.num_tokens or (counts == 1).all():
        place = np.arange(len(rows.requests))
        first_token = starts
    else:
        place = np.repeat(np.arange(len(rows.requests)), counts)
        index = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
        first_token = starts[place] + index * tokens_per_tile
    count = np.minimum(ends[place] - first_token, tokens_per_tile)
    position = num_cached[place] + first_token - starts[place]
    end_key = position + count
    request = rows.requests[place]
    if batch.tree_masks:
        # Any row of a tree may see any slot of the query; its position is at least the query's begin.
        is_tree = np.isin(request, list(batch.tree_masks))
        position = np.where(is_tree, num_cached[place], position)
        end_key = np.where(is_tree, batch.seq_lens[request], end_key)
    end_key = np.minimum(end_key, key_ends[request])
    first_key = np.zeros_like(position)
    if window is not None:
        first_key = np.minimum(np.maximum(position - (window - 1), 0), end_key)
    return Tiles(request, first_token, count, first_key, end_key)


@dataclass(frozen=True)
class Sharing:
    """Tiles of several requests over shared keys. The own tiles of these requests begin behind those."""

    tiles: Tiles
    """`first_token` is a place in `members`."""
    shared_tile: np.ndarray
    """Of each own tile: index of its tile here, or -1."""
    offset: np.ndarray
    """Of each own tile: place of its first token in that."""


@dataclass(frozen=True)
class Items:
    """What one launch consists of, with its arrays as kernels.py describes them."""

    items: np.ndarray
    merges: np.ndarray
    """[n, 8] int32; n 0: all tiles are in one piece."""


def create_items(
    batch: AttentionBatch,
    tiles: Tiles,
    table_width: int,
    most_extra: int,
    group: int,
    sharing: Sharing | None = None,
    *,
    in_runs: bool = False,
) -> Items:
    """The items of `tiles`, and of the tiles in `sharing`: at most `most_extra` more than `tiles`.

    Keys are cut so that about `most_extra` items of equal length come about; `in_runs`: into runs of `RUN`, the longest
    tiles first, as long as there may be more items. Items are in the order of their lengths, so that no program starts
    late with much to do. `group`: query heads of a key head.
    """
    num_own = len(tiles.request)
    if sharing is not None:
        most_extra -= len(sharing.tiles.request)
        tiles = _joined(tiles, sharing.tiles)
    splits = (_runs if in_runs else _even_splits)(tiles, most_extra)
    is_part = splits > 1
    if sharing is not None:
        is_part[num_own:] = True
        is_part[:num_own] |= sharing.shared_tile >= 0
    part_rows = np.where(is_part, splits * tiles.count * group, 0)
    first_part = np.cumsum(part_rows) - part_rows
    place = np.argsort(-((tiles.end_key - tiles.first_key) // splits), kind="stable")
    ordered = splits[place]
    index = np.arange(ordered.sum()) - np.repeat(np.cumsum(ordered) - ordered, ordered)
    place = np.repeat(place, ordered)
    items = np.zeros((len(place), 8), dtype=np.int32)
    request, of = tiles.request[place], splits[place]
    bound = _run_bound if in_runs else _even_bound
    items[:, 0] = tiles.first_token[place]
    items[:, 1] = tiles.count[place]
    items[:, 2] = request * table_width
    items[:, 3], items[:, 4] = (
        bound(tiles.first_key[place], tiles.end_key[place], index + step, of) for step in (0, 1)
    )
    items[:, 5] = batch.seq_lens[request] - (batch.query_start[request + 1] - batch.query_start[request])
    items[:, 6] = batch.query_start[request]
    items[:, 7] = np.where(is_part[place], first_part[place] + index * tiles.count[place] * group, -1)
    items[place >= num_own, 5:7] = (SHARED, -1)
    merges = np.zeros((int(is_part[:num_own].sum()), 8), dtype=np.int32)
    if len(merges):
        merged = np.flatnonzero(is_part[:num_own])
        for column, values in enumerate((tiles.first_token, tiles.count, first_part, splits)):
            merges[:, column] = values[merged]
        if sharing is not None:
            _add_shared(merges, merged, sharing, first_part[num_own:], splits[num_own:])
    return Items(items, merges)


def _add_shared(
    merges: np.ndarray, merged: np.ndarray, sharing: Sharing, first_part: np.ndarray, splits: np.ndarray
) -> None:
    """Columns 4 to 7 of the merges of the own tiles `merged`."""
    shares = sharing.shared_tile[merged] >= 0
    shared_tile = sharing.shared_tile[merged][shares]
    columns = (first_part[shared_tile], splits[shared_tile], sharing.tiles.count[shared_tile])
    for column, values in enumerate((*columns, sharing.offset[merged][shares])):
        merges[shares, 4 + column] = values


def _joined(first: Tiles, second: Tiles) -> Tiles:
    return Tiles(*(np.concatenate(pair) for pair in zip(vars(first).values(), vars(second).values(), strict=True)))


def _even_splits(tiles: Tiles, most_extra: int) -> np.ndarray:
    """int32: parts of each tile. A tile without keys has one too, which writes zeros."""
    lengths = tiles.end_key - tiles.first_key
    chunk = max(MIN_SPLIT, int(lengths.sum()) / max(most_extra, 1))
    return np.maximum(np.ceil(lengths / chunk), 1).astype(np.int32)


def _runs(tiles: Tiles, most_extra: int) -> np.ndarray:
    """int32: runs of each tile, 1 where it is left in one piece."""
    runs = np.maximum(-(-tiles.end_key // RUN) - tiles.first_key // RUN, 1)
    order = np.argsort(-runs, kind="stable")
    is_cut = np.zeros(len(runs), dtype=bool)
    is_cut[order] = np.cumsum(runs[order] - 1) <= most_extra
    return np.where(is_cut, runs, 1).astype(np.int32)


def _even_bound(first: np.ndarray, end: np.ndarray, index: np.ndarray, of: np.ndarray) -> np.ndarray:
    """Where part `index` of `of` begins: at a multiple of SPLIT_ALIGN, but for the ends."""
    inner = (first + (end - first).astype(np.int64) * index // of) // SPLIT_ALIGN * SPLIT_ALIGN
    return np.where(index == 0, first, np.where(index == of, end, np.maximum(inner, first)))


def _run_bound(first: np.ndarray, end: np.ndarray, index: np.ndarray, of: np.ndarray) -> np.ndarray:
    """Where run `index` of `of` begins: at a multiple of RUN, but for the ends."""
    return np.where(index == 0, first, np.where(index == of, end, (first // RUN + index) * RUN))
