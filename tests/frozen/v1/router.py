"""Sends requests that begin alike to one replica."""

from collections.abc import Sequence

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.router import FollowsBlocks, FollowsRequests, ReplicaState, RoutedRequest, RouterSetup


class Options(PluginOptions):
    most: int = 8


class Frozen(FollowsRequests, FollowsBlocks):
    contract = (1, 0)
    Options = Options

    def __init__(self, options: Options, setup: RouterSetup):
        super().__init__(options, setup)
        self._at: dict[str, int] = {}
        self._has: dict[int, set[bytes]] = {}

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> int:
        up = {state.index: state.num_waiting + state.num_running for state in replicas if state.is_up}
        first = request.block_hashes[:1]
        near = [i for i in up if up[i] < self.options.most and first and first[0] in self._has.get(i, ())]
        chosen = min(near or up, key=lambda i: (up[i], i))
        self._at[request.request_id] = chosen
        return chosen

    def prefilled(self, request_id: str) -> None:
        assert request_id in self._at

    def finished(self, request_id: str) -> None:
        self._at.pop(request_id, None)

    def replica_lost(self, replica: int) -> None:
        self._has.pop(replica, None)
        self._at = {name: index for name, index in self._at.items() if index != replica}

    def blocks_stored(self, replica: int, block_hashes: Sequence[bytes]) -> None:
        self._has.setdefault(replica, set()).update(block_hashes)

    def blocks_removed(self, replica: int, block_hashes: Sequence[bytes]) -> None:
        self._has.get(replica, set()).difference_update(block_hashes)

    def all_blocks_cleared(self, replica: int) -> None:
        self._has.pop(replica, None)
