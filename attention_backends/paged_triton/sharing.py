"""Cascade attention: the tiles of requests that share a prefix, which read its keys once for several requests.

The tokens of a group's requests fill tiles together, over the shared keys, and tiles of their own over the rest; what
both give is put together by the maxima and sums of the scores, as parts of cut ranges are (Ye et al. 2024, "Cascade
Inference"; Juravsky et al. 2024, "Hydragen", section 3.1). Decode tiles have rows to spare: with four query heads to a
key head, a tile of 16 rows holds four requests in place of one.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dovetail.attention_backends.paged_triton.plan import MIN_SPLIT, SPLIT_ALIGN, Sharing, Tiles
from dovetail.attention_backends.shared_prefix import SharedPrefix, shared_prefixes
from dovetail.contracts.attention import AttentionBatch

MIN_REQUESTS = 4
"""Fewer than these do not fill a tile of the smallest size with the usual four query heads to a key head."""
MIN_KEYS = 2 * MIN_SPLIT
"""A request that shares keys has one part more to put together, which costs about what MIN_SPLIT keys do; so less than
twice as many are read by each request itself."""


def find_groups(
    batch: AttentionBatch, requests: np.ndarray, block_size: int, most_tokens: int
) -> list[tuple[SharedPrefix, int]]:
    """Groups among `requests` with the number of keys that each shares, those that save most first, as long as they
    have at most `most_tokens` tokens in all."""
    groups = []
    for group in shared_prefixes(batch, requests, block_size, MIN_REQUESTS, MIN_KEYS):
        keys = group.num_blocks * block_size // SPLIT_ALIGN * SPLIT_ALIGN
        if keys >= MIN_KEYS:
            groups.append((group, keys))
    groups.sort(key=lambda found: -len(found[0].members) * found[1])
    taken, num_tokens = [], 0
    for group, keys in groups:
        num_tokens += int((batch.query_start[group.members + 1] - batch.query_start[group.members]).sum())
        if num_tokens > most_tokens:
            break
        taken.append((group, keys))
    return taken


def share(
    tiles: Tiles,
    groups: list[tuple[SharedPrefix, int]],
    tokens_per_tile: int,
    most_tiles: int,
    members: np.ndarray,
) -> tuple[Tiles, Sharing | None]:
    """`tiles` with those of the groups' requests beginning behind the shared keys, and the tiles over these, at most
    `most_tiles`. Fills `members`; None where no two tiles fit into one."""
    first_key = tiles.first_key.copy()
    shared_tile, offset = np.full(len(first_key), -1), np.zeros(len(first_key), dtype=np.int64)
    found: list[tuple[int, int, int, int]] = []
    num_members = 0
    for group, keys in groups:
        own = np.flatnonzero(np.isin(tiles.request, group.members))
        packed, begins = _pack(tiles.count[own], tokens_per_tile)
        num_tiles = int(packed[-1]) + 1
        if num_tiles == len(own) or len(found) + num_tiles > most_tiles:
            continue
        counts = tiles.count[own]
        first_key[own] = keys
        shared_tile[own], offset[own] = packed + len(found), begins
        ends = num_members + np.cumsum(np.bincount(packed, weights=counts)).astype(np.int64)
        starts = np.concatenate([[num_members], ends[:-1]])
        rows = np.repeat(tiles.first_token[own] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        members[num_members : num_members + len(rows)] = rows
        request = int(group.members[0])
        found += [(request, int(start), int(end - start), keys) for start, end in zip(starts, ends, strict=True)]
        num_members += len(rows)
    if not found:
        return tiles, None
    request_of, first_token, count, end_key = np.array(found, dtype=np.int32).T
    shared = Tiles(request_of, first_token, count, np.zeros_like(end_key), end_key)
    return replace(tiles, first_key=first_key), Sharing(shared, shared_tile, offset)


def _pack(counts: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """For each of some runs of tokens, in order: its tile, of at most `most` tokens, and its place there."""
    tile = used = 0
    packed, begins = [], []
    for count in counts.tolist():
        if used + count > most:
            tile, used = tile + 1, 0
        packed.append(tile)
        begins.append(used)
        used += count
    return np.array(packed), np.array(begins)
