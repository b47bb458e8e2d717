"""A host of a router without engines, and requests for it: what the suite of routers is made of."""

from __future__ import annotations

import random
from dataclasses import replace

from dovetail.contracts.router import FollowsBlocks, FollowsRequests, ReplicaState, RoutedRequest, Router

BLOCK_SIZE = 16
"""Tokens per block."""


class SimulatedHost:
    """A host with a router: counts requests and blocks, and reports what happens, as the contract says.

    Prefix caches are simple: a replica has the blocks of the prompts that it computed, until `evict`.
    """

    def __init__(self, router: Router, num_replicas: int):
        self.router = router
        self.states = [ReplicaState(index=index, name=f"r{index}") for index in range(num_replicas)]
        self.choices: list[int] = []
        self._at: dict[str, tuple[int, RoutedRequest, bool]] = {}
        """Request -> its replica, itself, and whether its prompt is computed."""
        self._blocks: list[set[bytes]] = [set() for _ in range(num_replicas)]

    @property
    def waiting(self) -> list[str]:
        """Requests whose prompts are not computed."""
        return [name for name, (_, _, is_computed) in self._at.items() if not is_computed]

    @property
    def running(self) -> list[str]:
        """Requests whose prompts are computed."""
        return [name for name, (_, _, is_computed) in self._at.items() if is_computed]

    @property
    def up(self) -> list[int]:
        """Replicas that take requests."""
        return [state.index for state in self.states if state.is_up]

    def send(self, request: RoutedRequest) -> int:
        """Asks the router, and sends the request to the replica that it chooses."""
        chosen = self.router.choose(request, tuple(self.states))
        assert isinstance(chosen, int), f"choose returned {chosen!r}, which is no index"
        assert 0 <= chosen < len(self.states), f"choose returned {chosen} of {len(self.states)} replicas"
        assert self.states[chosen].is_up, f"choose returned replica {chosen}, which is not up"
        self.choices.append(chosen)
        self._at[request.request_id] = (chosen, request, False)
        self._count(chosen)
        return chosen

    def compute(self, request_id: str) -> None:
        """The request's prompt is computed, and its blocks are stored."""
        replica, request, _ = self._at[request_id]
        self._at[request_id] = (replica, request, True)
        self._blocks[replica].update(request.block_hashes)
        if isinstance(self.router, FollowsBlocks) and request.block_hashes:
            self.router.blocks_stored(replica, request.block_hashes)
        self._count(replica)
        if isinstance(self.router, FollowsRequests):
            self.router.prefilled(request_id)

    def finish(self, request_id: str) -> None:
        """The request ends, computed or not."""
        replica, _, _ = self._at.pop(request_id)
        self._count(replica)
        if isinstance(self.router, FollowsRequests):
            self.router.finished(request_id)

    def evict(self, replica: int, count: int) -> None:
        """So many of the replica's blocks are removed."""
        gone = sorted(self._blocks[replica])[:count]
        self._blocks[replica].difference_update(gone)
        if isinstance(self.router, FollowsBlocks) and gone:
            self.router.blocks_removed(replica, tuple(gone))

    def clear(self, replica: int) -> None:
        """The replica's prefix cache is reset."""
        self._blocks[replica].clear()
        if isinstance(self.router, FollowsBlocks):
            self.router.all_blocks_cleared(replica)

    def lose(self, replica: int, *, retries: bool = True) -> None:
        """The replica dies; its requests are sent elsewhere or end."""
        self.states[replica] = ReplicaState(index=replica, name=f"r{replica}", is_up=False)
        self._blocks[replica].clear()
        if isinstance(self.router, FollowsRequests | FollowsBlocks):
            self.router.replica_lost(replica)
        for request_id, (at, request, _) in list(self._at.items()):
            if at == replica:
                del self._at[request_id]
                if retries and self.up:
                    self.send(request)
                elif isinstance(self.router, FollowsRequests):
                    self.router.finished(request_id)

    def join(self, replica: int) -> None:
        """A replica without blocks is at this index, which may be a new one."""
        state = ReplicaState(index=replica, name=f"r{replica}")
        if replica == len(self.states):
            self.states.append(state)
            self._blocks.append(set())
        else:
            self.states[replica] = state

    def end_all(self) -> None:
        """All requests end, and all blocks are removed."""
        for request_id in [*self.waiting, *self.running]:
            self.finish(request_id)
        for replica in range(len(self.states)):
            self.evict(replica, len(self._blocks[replica]))

    def _count(self, replica: int) -> None:
        here = [(request, is_computed) for at, request, is_computed in self._at.values() if at == replica]
        waiting = [request.num_prompt_tokens for request, is_computed in here if not is_computed]
        running = [request.num_prompt_tokens for request, is_computed in here if is_computed]
        self.states[replica] = replace(
            self.states[replica],
            num_waiting=len(waiting),
            num_running=len(running),
            waiting_prompt_tokens=sum(waiting),
            running_prompt_tokens=sum(running),
            kv_usage=min(1.0, sum(running) / 10_000),
        )


class Traffic:
    """Requests of conversations that share prefixes, by a seed."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self._number = 0
        self._seed = seed

    def request(self) -> RoutedRequest:
        """The next one."""
        self._number += 1
        talk, length = self.random.randrange(6), self.random.randrange(0, 12)
        return RoutedRequest(
            request_id=f"{self._seed}-{self._number}",
            num_prompt_tokens=length * BLOCK_SIZE + self.random.randrange(1, BLOCK_SIZE),
            max_tokens=self.random.choice((1, 16, 512)),
            block_size=BLOCK_SIZE,
            block_hashes=tuple(b"%d/%d/%d" % (self._seed, talk, index) for index in range(length)),
        )

    def act(self, host: SimulatedHost) -> None:
        """One thing happens, most often a request."""
        kind = self.random.choices(("send", "compute", "finish", "evict", "clear"), (8, 6, 5, 2, 1))[0]
        replica = self.random.randrange(len(host.states))
        if kind == "send" and host.up:
            host.send(self.request())
        elif kind == "compute" and host.waiting:
            host.compute(self.random.choice(host.waiting))
        elif kind == "finish" and host.waiting + host.running:
            host.finish(self.random.choice(host.waiting + host.running))
        elif kind == "evict" and host.states[replica].is_up:
            host.evict(replica, self.random.randrange(1, 8))
        elif kind == "clear" and host.states[replica].is_up:
            host.clear(replica)
