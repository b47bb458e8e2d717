"""What the suite of routers finds: each a change in a router that passes."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.router import (
    FollowsBlocks,
    FollowsRequests,
    ReplicaState,
    RoutedRequest,
    RouterSetup,
)
from dovetail.testing.faults import Fault, check_fault
from dovetail.testing.router_suite import RouterSuite


class Sticky(FollowsRequests, FollowsBlocks):
    """Where the prompt's first block is, unless too many requests are there; else the fewest requests."""

    contract = (1, 0)

    def __init__(self, options: PluginOptions, setup: RouterSetup):
        super().__init__(options, setup)
        self.at: dict[str, int] = {}
        self.holders: dict[bytes, set[int]] = {}

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> int:
        loads = {state.index: list(self.at.values()).count(state.index) for state in replicas if state.is_up}
        holders = self.holders.get(request.block_hashes[0], set()) if request.block_hashes else set()
        near = [index for index in loads if index in holders and loads[index] < 2 * min(loads.values()) + 4]
        index = min(near or loads, key=lambda i: (loads[i], i))
        self.at[request.request_id] = index
        return index

    def prefilled(self, request_id: str) -> None:
        assert request_id in self.at

    def finished(self, request_id: str) -> None:
        self.at.pop(request_id, None)

    def blocks_stored(self, replica: int, block_hashes: Sequence[bytes]) -> None:
        for content in block_hashes:
            self.holders.setdefault(content, set()).add(replica)

    def blocks_removed(self, replica: int, block_hashes: Sequence[bytes]) -> None:
        for content in block_hashes:
            holders = self.holders.get(content, set())
            holders.discard(replica)
            if not holders:
                self.holders.pop(content, None)

    def all_blocks_cleared(self, replica: int) -> None:
        self.blocks_removed(replica, list(self.holders))

    def replica_lost(self, replica: int) -> None:
        self.all_blocks_cleared(replica)
        self.at = {request_id: index for request_id, index in self.at.items() if index != replica}


class TestSticky(RouterSuite):
    plugin = Sticky


class IgnoresDown(Sticky):
    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> int:
        return len(self.at) % len(replicas) if super().choose(request, replicas) >= 0 else 0


class ReturnsTheName(Sticky):
    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> Any:
        return replicas[super().choose(request, replicas)].name


class BelievesThatNothingIsAdded(Sticky):
    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> int:
        return super().choose(request, replicas[: self.setup.num_replicas])


class LearnsOfLossFromEventsAlone(Sticky):
    """Does not read `is_up`."""

    def __init__(self, options: PluginOptions, setup: RouterSetup):
        super().__init__(options, setup)
        self.lost: set[int] = set()

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> int:
        up = [state for state in replicas if state.index not in self.lost]
        self.at[request.request_id] = index = min(
            (state.index for state in up), key=lambda i: (list(self.at.values()).count(i), i)
        )
        return index

    def replica_lost(self, replica: int) -> None:
        super().replica_lost(replica)
        self.lost.add(replica)


class NeverUsesItAgain(Sticky):
    def __init__(self, options: PluginOptions, setup: RouterSetup):
        super().__init__(options, setup)
        self.lost: set[int] = set()

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> int:
        good = [state for state in replicas if state.index not in self.lost]
        return super().choose(request, good if any(state.is_up for state in good) else replicas)

    def replica_lost(self, replica: int) -> None:
        super().replica_lost(replica)
        self.lost.add(replica)


class AsksForTheFirstBlock(Sticky):
    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> int:
        assert request.block_hashes[0]
        return super().choose(request, replicas)


class ReadsTheBlockBehind(Sticky):
    """The partial block behind the full ones, which a prompt need not have."""

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> int:
        assert request.num_prompt_tokens % request.block_size
        return super().choose(request, replicas)


class DrawsLots(Sticky):
    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> int:
        self.at[request.request_id] = index = random.choice([state.index for state in replicas if state.is_up])
        return index


class SharedByHosts(Sticky):
    shared: ClassVar[dict[str, int]] = {}

    def __init__(self, options: PluginOptions, setup: RouterSetup):
        super().__init__(options, setup)
        self.at = self.shared
        if len(self.shared) > 100:
            self.shared.clear()

    def replica_lost(self, replica: int) -> None:
        self.all_blocks_cleared(replica)


class LovesTheFirst(Sticky):
    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> int:
        return next(state.index for state in replicas if state.is_up)


class CountsOnEveryRemoval(Sticky):
    def blocks_removed(self, replica: int, block_hashes: Sequence[bytes]) -> None:
        for content in block_hashes:
            self.holders[content].discard(replica)

    def all_blocks_cleared(self, replica: int) -> None:
        Sticky.blocks_removed(self, replica, list(self.holders))


class RefusesAnIdThatComesAgain(Sticky):
    def __init__(self, options: PluginOptions, setup: RouterSetup):
        super().__init__(options, setup)
        self.seen: set[str] = set()

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> int:
        assert request.request_id not in self.seen
        self.seen.add(request.request_id)
        return super().choose(request, replicas)


class SortsTheHostsList(Sticky):
    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> int:
        index = super().choose(request, replicas)
        if isinstance(replicas, list):
            replicas.sort(key=lambda state: -state.index)
        return index


class Waits(Sticky):
    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> int:
        time.sleep(0)
        return super().choose(request, replicas)


class KeepsRequests(Sticky):
    def finished(self, request_id: str) -> None:
        pass


class KeepsBlocks(Sticky):
    def blocks_removed(self, replica: int, block_hashes: Sequence[bytes]) -> None:
        for content in block_hashes:
            self.holders.get(content, set()).discard(replica)


class KeepsBlocksOfTheLost(Sticky):
    def replica_lost(self, replica: int) -> None:
        self.at = {request_id: index for request_id, index in self.at.items() if index != replica}


FAULTS = [
    Fault("sends to replicas that are down", IgnoresDown, "test_chooses_a_replica_that_is_up"),
    Fault("returns a name", ReturnsTheName, "test_one_replica_takes_all"),
    Fault("does not read is_up", LearnsOfLossFromEventsAlone, "test_a_state_alone_says_that_a_replica_is_down"),
    Fault("asks for a block that is not there", AsksForTheFirstBlock, "test_prompts_may_have_no_block"),
    Fault("takes a partial block for granted", ReadsTheBlockBehind, "test_a_prompt_may_be_its_full_blocks"),
    Fault("draws lots", DrawsLots, "test_the_same_events_give_the_same_choices"),
    Fault("has one state for all hosts", SharedByHosts, "test_routers_are_apart"),
    Fault("sends all to one replica", LovesTheFirst, "test_uses_every_replica"),
    Fault("never uses a replica that was lost", NeverUsesItAgain, "test_a_replica_that_comes_back_is_used"),
    Fault("knows the first replicas only", BelievesThatNothingIsAdded, "test_replicas_may_be_added"),
    Fault("fails for unknown blocks", CountsOnEveryRemoval, "test_events_may_be_of_what_is_unknown"),
    Fault("refuses a request that is retried", RefusesAnIdThatComesAgain, "test_a_request_id_may_come_again"),
    Fault("sorts the host's list", SortsTheHostsList, "test_leaves_its_arguments_alone"),
    Fault("sleeps", Waits, "test_answers_at_once"),
    Fault("keeps requests that ended", KeepsRequests, "test_forgets_what_has_ended"),
    Fault("keeps blocks that were removed", KeepsBlocks, "test_forgets_what_has_ended"),
    Fault("keeps blocks of a lost replica", KeepsBlocksOfTheLost, "test_forgets_a_lost_replica"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_finds_a_router_that(fault: Fault) -> None:
    check_fault(fault, RouterSuite, plugin=fault.plugin)
