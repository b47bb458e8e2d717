"""Requests with a common prefix: `sdpa` reads it once, and attends as if it had not."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.attention_backends.reference import ReferenceBackend
from dovetail.attention_backends.sdpa import SDPABackend, SDPAOptions
from dovetail.attention_backends.shared_prefix import shared_prefixes
from dovetail.contracts.attention import AttentionBatch, AttentionLayer, AttentionSetup
from dovetail.contracts.kv import KVSpec
from dovetail.contracts.plugin import PluginOptions
from dovetail.testing.attention_cases import make_batch

BLOCK_SIZE = 8
NUM_BLOCKS = 200


def make_setup(dtype: str) -> AttentionSetup:
    layer = AttentionLayer(0, num_heads=6, num_kv_heads=2, head_size=16, scale=0.25)
    return AttentionSetup(
        (layer,), KVSpec(num_kv_heads=2, head_size=16, dtype=dtype), BLOCK_SIZE, dtype, "cpu", 16, 256, 512
    )


def make_requests(query_len: int, shuffled: bool) -> list[tuple[list[int], int, int]]:
    """Six requests behind one prefix of 20 blocks, four behind another of 17, two of their own."""
    draw = random.Random(query_len)
    blocks = list(range(1, NUM_BLOCKS))
    if shuffled:
        draw.shuffle(blocks)
    requests = []
    for size, count in ((20, 6), (17, 4), (0, 2)):
        prefix = [blocks.pop(0) for _ in range(size)]
        for _ in range(count):
            own = draw.randrange(query_len, 30)
            seq_len = size * BLOCK_SIZE + own
            needed = -(-seq_len // BLOCK_SIZE) - size
            requests.append((prefix + [blocks.pop(0) for _ in range(needed)], seq_len - query_len, seq_len))
    draw.shuffle(requests)
    return requests


def chain_and_tree(query_len: int, num_requests: int) -> dict[int, np.ndarray]:
    """Every third request verifies a tree in which all drafts are siblings."""
    if query_len == 1:
        return {}
    mask = np.eye(query_len, dtype=bool)
    mask[:, 0] = True
    return dict.fromkeys(range(0, num_requests, 3), mask)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 0.02)])
def test_sharing_changes_nothing(dtype: str, tolerance: float, query_len: int, shuffled: bool) -> None:
    setup = make_setup(dtype)
    requests = make_requests(query_len, shuffled)
    batch: AttentionBatch = make_batch(requests, setup, chain_and_tree(query_len, len(requests)))
    generator = torch.Generator().manual_seed(0)
    num_tokens = int(batch.query_start[-1])
    torch_dtype = getattr(torch, dtype)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch_dtype)

    query, key, value = draw(num_tokens, 6, 16), draw(num_tokens, 2, 16), draw(num_tokens, 2, 16)
    keys, values = draw(NUM_BLOCKS, BLOCK_SIZE, 2, 16), draw(NUM_BLOCKS, BLOCK_SIZE, 2, 16)
    found = []
    for backend in (ReferenceBackend(PluginOptions(), setup), SDPABackend(SDPAOptions(), setup)):
        cache = torch.zeros(backend.kv_cache_shape(NUM_BLOCKS), dtype=torch_dtype)
        fill(backend, setup, cache, keys, values)
        backend.plan(batch)
        found.append(backend.forward(setup.layers[0], query, key, value, cache).float())
    torch.testing.assert_close(found[1], found[0], atol=tolerance, rtol=0)


def fill(
    backend: ReferenceBackend | SDPABackend,
    setup: AttentionSetup,
    cache: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Writes every page through the backend itself, whatever its layout."""
    for block in range(1, NUM_BLOCKS):
        backend.plan(make_batch([([block], 0, BLOCK_SIZE)], setup, {}))
        query = torch.zeros(BLOCK_SIZE, 6, 16, dtype=keys.dtype)
        backend.forward(setup.layers[0], query, keys[block], values[block], cache)


def test_groups_are_found_whole_blocks_only() -> None:
    setup = make_setup("float32")
    requests = make_requests(1, shuffled=True)
    batch = make_batch(requests, setup, {})
    groups = shared_prefixes(batch, np.arange(len(requests)), BLOCK_SIZE, min_requests=4, min_keys=128)
    assert sorted((len(group.members), group.num_blocks) for group in groups) == [(4, 17), (6, 20)]
    for group in groups:
        for member in group.members:
            blocks, num_cached, _ = requests[member]
            assert blocks[: group.num_blocks] == requests[group.members[0]][0][: group.num_blocks]
            assert group.num_blocks * BLOCK_SIZE <= num_cached


def test_a_longer_prefix_of_some_is_preferred_where_it_saves_more() -> None:
    """Eight requests share a block, and five of these 40: five that read 40 blocks once save more than eight that read
    one."""
    setup = make_setup("float32")
    long, other = list(range(1, 41)), [1, *range(50, 90)]
    rows = [([*long, 100 + i], 41 * BLOCK_SIZE - 1, 41 * BLOCK_SIZE) for i in range(5)]
    rows += [([1, *range(110 + 30 * i, 139 + 30 * i)], 30 * BLOCK_SIZE - 1, 30 * BLOCK_SIZE) for i in range(2)]
    rows.append((other, 41 * BLOCK_SIZE - 1, 41 * BLOCK_SIZE))
    [group] = shared_prefixes(make_batch(rows, setup, {}), np.arange(8), BLOCK_SIZE, min_requests=4, min_keys=8)
    assert (group.members.tolist(), group.num_blocks) == ([0, 1, 2, 3, 4], 40)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=40), min_size=1, max_size=12), st.integers(1, 4))
def test_members_share_what_is_said_and_belong_to_one_group(tables: list[list[int]], min_requests: int) -> None:
    rows = [(table, len(table) * BLOCK_SIZE - 1, len(table) * BLOCK_SIZE) for table in tables]
    setup = make_setup("float32")
    batch = make_batch(rows, setup, {})
    groups = shared_prefixes(batch, np.arange(len(rows)), BLOCK_SIZE, min_requests, min_keys=8)
    members = [int(member) for group in groups for member in group.members]
    assert len(members) == len(set(members))
    for group in groups:
        assert len(group.members) >= min_requests
        assert group.num_blocks >= 1
        for member in group.members:
            assert tables[member][: group.num_blocks] == tables[group.members[0]][: group.num_blocks]
            assert group.num_blocks < len(tables[member]), "the block of the query's own token is no prefix"


def test_of_prefixes_within_each_other_the_one_that_saves_most_is_taken() -> None:
    """Request i has the first i blocks of one text, so that each group holds the next."""
    setup = make_setup("float32")
    depths = range(1, 60)
    rows = [(list(range(1, 2 + n)), (n + 1) * BLOCK_SIZE - 1, (n + 1) * BLOCK_SIZE) for n in depths]
    [group] = shared_prefixes(make_batch(rows, setup, {}), np.arange(len(rows)), BLOCK_SIZE, min_requests=4, min_keys=8)
    saved = (len(group.members) - 1) * group.num_blocks
    assert saved == max((sum(n >= depth for n in depths) - 1) * depth for depth in depths)
