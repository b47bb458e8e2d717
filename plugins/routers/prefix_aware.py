"""Requests go where the least is left to compute: cached prefixes traded against load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.router import FollowsBlocks, FollowsRequests, ReplicaState, RoutedRequest, RouterSetup
from dovetail.plugins.routers.block_index import BlockIndex
from dovetail.plugins.routers.placements import Placement, Placements


class PrefixAwareOptions(PluginOptions):
    """What a config may say besides the name."""

    request_cost: int = Field(default=64, ge=0)
    """Tokens that each request at a replica adds to its cost until the request ends: requests that generate slow others
    too. 0: only prompts count."""


class PrefixAware(FollowsRequests, FollowsBlocks):
    """Sends each request to the replica on which the fewest tokens are left to compute.

    The cost of a replica = the request's prompt tokens - those that the replica has cached + tokens of other prompts
    that it has yet to compute + `request_cost` for each of its requests. Cached is the longest run of the prompt's
    blocks that the replica has by its KV events, and of blocks that an earlier request is computing there. So it is
    exact: no guess from texts. Equal costs: the replica with fewer requests, then the lower index.

    For example, with 512 tokens per block and a prompt of 4,096 tokens: replica 0 has 6 blocks of it and 3,000 tokens
    to compute, which costs 1,024 + 3,000; replica 1 is idle and has 1 block, which costs 3,584, and is chosen.

    Memory: an entry per block and replica, for the blocks that replicas have and those of prompts under way.
    """

    contract: ClassVar[tuple[int, int]] = (1, 0)
    preference: ClassVar[int] = 10
    Options = PrefixAwareOptions
    options: PrefixAwareOptions

    def __init__(self, options: PluginOptions, setup: RouterSetup):
        super().__init__(options, setup)
        self._index = BlockIndex()
        self._placements = Placements()

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> int:
        # The last token is always computed: its state gives the first output token.
        usable = request.block_hashes[: max(0, request.num_prompt_tokens - 1) // request.block_size]
        runs = self._index.runs(usable)
        placements, request_cost = self._placements, self.options.request_cost
        best: tuple[int, int, int] | None = None
        for state in replicas:
            if state.is_up:
                index, count = state.index, placements.count(state.index)
                saved = runs.get(index, 0) * request.block_size
                cost = placements.tokens(index) + count * request_cost - saved, count, index
                best = cost if best is None or cost < best else best
        assert best is not None, "the host calls only where a replica is up"
        index = best[2]
        run = runs.get(index, 0)
        pending = request.block_hashes[run:]
        left = request.num_prompt_tokens - run * request.block_size
        placements.place(request.request_id, Placement(index, left, 0, pending))
        self._index.expect(index, pending)
        return index

    def prefilled(self, request_id: str) -> None:
        self._expect_no_longer(self._placements.prefilled(request_id))

    def finished(self, request_id: str) -> None:
        self._expect_no_longer(self._placements.finished(request_id))

    def blocks_stored(self, replica: int, block_hashes: Sequence[bytes]) -> None:
        self._index.store(replica, block_hashes)

    def blocks_removed(self, replica: int, block_hashes: Sequence[bytes]) -> None:
        self._index.remove(replica, block_hashes)

    def all_blocks_cleared(self, replica: int) -> None:
        self._index.clear(replica)

    def replica_lost(self, replica: int) -> None:
        self._index.clear(replica)
        for placement in self._placements.lost(replica):
            self._expect_no_longer(placement)

    def _expect_no_longer(self, placement: Placement | None) -> None:
        if placement is not None:
            self._index.expect_no_longer(placement.replica, placement.pending)
