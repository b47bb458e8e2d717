"""The step plan of `paged_cpu`: what each token sees, and the units of work that threads take one by one.

A **unit** is some query tokens and a range of the keys of one request. Long queries are cut into units by tokens; where
there are fewer units than threads could share, long key ranges are cut as well; and requests whose block tables begin
alike get common units for their prefix, whose keys are then read once for all of them (Hydragen, Juravsky et al. 2024).
A token that several units serve has as many **parts**, put together by sums and maxima of the softmax.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dovetail.contracts.attention import AttentionBatch, Reach

ROWS = 96
"""Rows (query token, query head of one key head) of a unit: what its scratch memory holds within the second-level
cache."""
MIN_SPLIT = 128
"""Keys below which a range is not cut: putting parts together would cost more."""
FIXED_SPLIT = 256
"""Keys of a range where the cuts must not depend on the step."""
MIN_SHARING = 4
MIN_PREFIX = 128
"""Requests, and tokens, from which on a common prefix has units of its own."""
TILE = 16
"""Keys that the kernels score together; ranges are cut at its multiples."""


@dataclass(frozen=True)
class Tokens:
    """What the T query tokens of one step see, whatever the layer. Arrays are copies."""

    query_start: np.ndarray
    """[R + 1] int32"""
    seq_lens: np.ndarray
    """[R] int32"""
    block_table: np.ndarray
    """[R, blocks] int32, contiguous"""
    slots: np.ndarray
    """[T] int64"""
    request: np.ndarray
    """[T] int32: the request of each token"""
    positions: np.ndarray
    """[T] int32"""
    num_cached: np.ndarray
    """[T] int32: keys before the query of its request"""
    query_first: np.ndarray
    """[T] int32: first query token of its request"""
    end_key: np.ndarray
    """[T] int32: keys from here on are hidden"""
    tree_row: np.ndarray
    """[T] int64: where its row of a tree mask begins in `tree`, or -1"""
    tree: np.ndarray
    """uint8: all tree masks, one after another"""

    @classmethod
    def of(cls, batch: AttentionBatch, block_size: int) -> Tokens:
        """Copies what the step needs out of the host's arrays."""
        if len(batch.seq_lens) == 1 and not batch.tree_masks:
            return cls._of_one(batch, block_size)
        query_start, seq_lens = batch.query_start.copy(), batch.seq_lens.copy()
        query_lens = np.diff(query_start)
        num_tokens = int(query_start[-1])
        request = np.repeat(np.arange(len(seq_lens), dtype=np.int32), query_lens)
        num_cached = (seq_lens - query_lens)[request]
        query_first = query_start[request]
        positions = num_cached + np.arange(num_tokens, dtype=np.int32) - query_first
        end_key = positions + np.int32(1)
        tree_row = np.full(num_tokens, -1, dtype=np.int64)
        masks: list[np.ndarray] = []
        offset = 0
        for index, mask in batch.tree_masks.items():
            rows = slice(int(query_start[index]), int(query_start[index + 1]))
            # A token of a tree stands at its depth, and sees any slot that its row of the mask names.
            positions[rows] = num_cached[rows] + mask.sum(axis=1) - 1
            end_key[rows] = seq_lens[index]
            tree_row[rows] = offset + np.arange(len(mask)) * len(mask)
            masks.append(mask.astype(np.uint8).reshape(-1))
            offset += mask.size
        return cls(
            query_start=query_start,
            seq_lens=seq_lens,
            block_table=_block_table(batch, block_size),
            slots=batch.slot_mapping.copy(),
            request=request,
            positions=positions,
            num_cached=num_cached,
            query_first=query_first,
            end_key=end_key,
            tree_row=tree_row,
            tree=np.concatenate(masks) if masks else np.zeros(1, dtype=np.uint8),
        )

    @classmethod
    def _of_one(cls, batch: AttentionBatch, block_size: int) -> Tokens:
        """What `of` comes to for one request without a tree, in fewer operations."""
        num_tokens, seq_len = len(batch.slot_mapping), int(batch.seq_lens[0])
        zeros = np.zeros(num_tokens, dtype=np.int32)
        positions = np.arange(seq_len - num_tokens, seq_len, dtype=np.int32)
        return cls(
            query_start=batch.query_start.copy(),
            seq_lens=batch.seq_lens.copy(),
            block_table=_block_table(batch, block_size),
            slots=batch.slot_mapping.copy(),
            request=zeros,
            positions=positions,
            num_cached=zeros + np.int32(seq_len - num_tokens),
            query_first=zeros,
            end_key=positions + np.int32(1),
            tree_row=np.full(num_tokens, -1, dtype=np.int64),
            tree=np.zeros(1, dtype=np.uint8),
        )


def _block_table(batch: AttentionBatch, block_size: int) -> np.ndarray:
    num_blocks = -(-batch.max_seq_len // block_size)
    return np.array(batch.block_table[:, :num_blocks], dtype=np.int32, order="C")


@dataclass(frozen=True)
class Units:
    """The units of one step for the layers of one reach."""

    first_key: np.ndarray
    """[T] int32: positions before are hidden"""
    unit_tokens: np.ndarray
    """int32: tokens of all units, one unit after another"""
    units: np.ndarray
    """[n, 6] int32: begin in unit_tokens, tokens, request whose block table is read, first key, end of keys, part"""
    merged: np.ndarray
    """int32: tokens of more than one part"""
    part_start: np.ndarray
    """[T + 1] int32: the place of each token's first part"""


def create_units(tokens: Tokens, reach: Reach, block_size: int, tokens_per_unit: int, units_wanted: float) -> Units:
    """Cuts a step, which has at least one token, into units. `units_wanted`: how many of equal cost should do, as far
    as there are keys enough to cut."""
    if len(tokens.seq_lens) == 1 and len(tokens.slots) <= tokens_per_unit:
        return _units_of_one(tokens, reach, units_wanted)
    return units_of_many(tokens, reach, block_size, tokens_per_unit, units_wanted)


def units_of_many(tokens: Tokens, reach: Reach, block_size: int, tokens_per_unit: int, units_wanted: float) -> Units:
    """`create_units` in general."""
    first_key = reach.first_keys(tokens.positions)
    own = _own_units(tokens, first_key, tokens_per_unit)
    clusters = list(shared_prefixes(tokens, block_size)) if reach.is_all else []
    unit_tokens = np.arange(len(first_key), dtype=np.int32)
    shared = []
    for members, num_blocks in clusters:
        end = num_blocks * block_size
        own[np.isin(own[:, 2], members), 3] = end
        member_tokens = np.flatnonzero(np.isin(tokens.request, members)).astype(np.int32)
        shared.append(_prefix_units(len(unit_tokens), len(member_tokens), int(members[0]), end, tokens_per_unit))
        unit_tokens = np.concatenate((unit_tokens, member_tokens))
    # All units of a cluster count as full ones, so that they are cut alike.
    costs = [tokens_per_unit * (units[:, 4] - units[:, 3]) for units in shared]
    costs.append(own[:, 1] * (own[:, 4] - own[:, 3]))
    splits = [
        _num_splits(units, cost, sum(map(np.sum, costs)) / units_wanted)
        for units, cost in zip((*shared, own), costs, strict=True)
    ]
    num_prefix_parts = np.zeros(len(tokens.seq_lens), dtype=np.int32)
    for (members, _), split in zip(clusters, splits, strict=False):
        num_prefix_parts[members] = split[0]
    own[:, 5] = num_prefix_parts[own[:, 2]]
    num_parts = num_prefix_parts[tokens.request] + np.repeat(splits[-1], own[:, 1])
    units = _cut(np.concatenate((*shared, own)), np.concatenate(splits))
    is_only = num_parts[unit_tokens[units[:, 0]]] == 1
    units[is_only, 5] = -1
    order = np.argsort(units[:, 1] * (units[:, 3] - units[:, 4]), kind="stable")
    return Units(
        first_key=first_key,
        unit_tokens=unit_tokens,
        units=np.ascontiguousarray(units[order]),
        merged=np.flatnonzero(num_parts > 1).astype(np.int32),
        part_start=np.concatenate(([0], np.cumsum(num_parts))).astype(np.int32),
    )


def _units_of_one(tokens: Tokens, reach: Reach, units_wanted: float) -> Units:
    """What the general way comes to for one request of so few tokens that they make one unit: the decode step of a
    single request, where planning would otherwise take a tenth of the step."""
    num_tokens = len(tokens.slots)
    first_key = reach.first_keys(tokens.positions)
    first, end = int(first_key.min()), int(tokens.end_key.max())
    num_keys = end - first
    count = max(1, min(math.ceil(units_wanted), num_keys // MIN_SPLIT))
    bounds = [first, *((first + num_keys * i // count) // TILE * TILE for i in range(1, count)), end]
    parts = range(count) if count > 1 else (-1,)
    rows = [(0, num_tokens, 0, bounds[i], bounds[i + 1], part) for i, part in enumerate(parts)]
    rows.sort(key=lambda unit: unit[3] - unit[4])
    every = np.arange(num_tokens + 1, dtype=np.int32)
    return Units(
        first_key=first_key,
        unit_tokens=every[:-1],
        units=np.array(rows, dtype=np.int32),
        merged=every[:-1] if count > 1 else every[:0],
        part_start=every * np.int32(count),
    )


def create_fixed_units(tokens: Tokens, tokens_per_unit: int) -> Units:
    """As `create_units`, without windows, shared prefixes or regard to how much work there is: keys are cut at
    multiples of `FIXED_SPLIT`, so that the order of a token's sums depends on its own keys alone. Parts that come to a
    token because its neighbours see more keys than it does add zeros."""
    first_key = np.zeros(len(tokens.slots), dtype=np.int32)
    own = _own_units(tokens, first_key, tokens_per_unit)
    splits = -(-own[:, 4] // FIXED_SPLIT)
    index = np.arange(splits.sum(), dtype=np.int32) - np.repeat(np.cumsum(splits) - splits, splits).astype(np.int32)
    units = np.repeat(own, splits, axis=0)
    units[:, 3] = index * FIXED_SPLIT
    units[:, 4] = np.minimum(units[:, 4], units[:, 3] + FIXED_SPLIT)
    units[:, 5] = np.where(np.repeat(splits, splits) == 1, -1, index)
    num_parts = np.repeat(splits, own[:, 1])
    order = np.argsort(units[:, 1] * (units[:, 3] - units[:, 4]), kind="stable")
    return Units(
        first_key=first_key,
        unit_tokens=np.arange(len(first_key), dtype=np.int32),
        units=np.ascontiguousarray(units[order]),
        merged=np.flatnonzero(num_parts > 1).astype(np.int32),
        part_start=np.concatenate(([0], np.cumsum(num_parts))).astype(np.int32),
    )


def shared_prefixes(tokens: Tokens, block_size: int) -> Iterator[tuple[np.ndarray, int]]:
    """Requests whose tables begin with the same blocks, and how many blocks that are; only whole blocks that lie before
    the query tokens of all of them count."""
    table = tokens.block_table
    if len(table) < MIN_SHARING:
        return
    num_full = tokens.num_cached[tokens.query_start[:-1]] // block_size
    depth = -(-MIN_PREFIX // block_size) - 1
    candidates = np.flatnonzero(num_full > depth)
    if len(candidates) < MIN_SHARING:
        return
    blocks, counts = np.unique(table[candidates, depth], return_counts=True)
    for block in blocks[counts >= MIN_SHARING]:
        members = candidates[table[candidates, depth] == block]
        most = int(num_full[members].min())
        is_common = (table[members, :most] == table[members[0], :most]).all(axis=0)
        num_blocks = most if is_common.all() else int(is_common.argmin())
        if num_blocks > depth:
            yield members, num_blocks


def _own_units(tokens: Tokens, first_key: np.ndarray, tokens_per_unit: int) -> np.ndarray:
    """Each request's tokens and all keys that they see, in the order of the tokens; part 0."""
    query_lens = np.diff(tokens.query_start)
    counts = -(-query_lens // tokens_per_unit)
    request = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    index = np.arange(len(request), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = tokens.query_start[request] + index * tokens_per_unit
    end = np.minimum(begin + tokens_per_unit, tokens.query_start[request + 1])
    units = np.zeros((len(request), 6), dtype=np.int32)
    units[:, 0], units[:, 1], units[:, 2] = begin, end - begin, request
    units[:, 3] = np.minimum.reduceat(first_key, begin)
    units[:, 4] = np.maximum.reduceat(tokens.end_key, begin)
    return units


def _prefix_units(first: int, count: int, request: int, end_key: int, tokens_per_unit: int) -> np.ndarray:
    """Units of `count` tokens, which stand from `first` on in unit_tokens, over the keys before `end_key`; part 0."""
    begin = np.arange(0, count, tokens_per_unit, dtype=np.int32)
    units = np.zeros((len(begin), 6), dtype=np.int32)
    units[:, 0], units[:, 1] = first + begin, np.minimum(tokens_per_unit, count - begin)
    units[:, 2], units[:, 4] = request, end_key
    return units


def _num_splits(units: np.ndarray, costs: np.ndarray, most: float) -> np.ndarray:
    """How many ranges of keys each unit becomes, so that none costs much more than `most`."""
    num_keys = units[:, 4] - units[:, 3]
    return np.clip(np.ceil(costs / most), 1, np.maximum(num_keys // MIN_SPLIT, 1)).astype(np.int32)


def _cut(units: np.ndarray, splits: np.ndarray) -> np.ndarray:
    """Each unit in `splits` ranges of its keys, as consecutive parts."""
    if (splits == 1).all():
        return units
    index = np.arange(splits.sum()) - np.repeat(np.cumsum(splits) - splits, splits)
    cut, count = np.repeat(units, splits, axis=0), np.repeat(splits, splits)
    first, num_keys = cut[:, 3].astype(np.int64), (cut[:, 4] - cut[:, 3]).astype(np.int64)
    bounds = [(first + num_keys * i // count) // TILE * TILE for i in (index, index + 1)]
    cut[:, 3] = np.where(index == 0, cut[:, 3], bounds[0])
    cut[:, 4] = np.where(index == count - 1, cut[:, 4], bounds[1])
    cut[:, 5] += index.astype(np.int32)
    return cut
