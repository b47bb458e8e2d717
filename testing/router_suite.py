"""Conformance suite of routers. A third party's test is a subclass::

    from dovetail.testing import RouterSuite

    class TestMyRouter(RouterSuite):
        plugin = MyRouter

Which replica is the best is the router's own question. What is tested: answers that a host can use, in any order of
events; that they depend on these alone; that lost replicas get nothing; and that nothing is kept of what has ended.
"""

from __future__ import annotations

import asyncio
import builtins
import gc
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any, ClassVar

import pytest

from dovetail.contracts.router import FollowsBlocks, FollowsRequests, ReplicaState, RoutedRequest, Router, RouterSetup
from dovetail.testing.router_traffic import BLOCK_SIZE, SimulatedHost, Traffic
from dovetail.testing.suite import PluginSuite


class RouterSuite(PluginSuite):
    """Tests of every router."""

    kind: ClassVar[str] = "router"
    plugin: ClassVar[type[Router]]
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of the router in a config."""
    num_replicas: ClassVar[int] = 4

    def create(self, num_replicas: int | None = None) -> Router:
        """A router as a host creates it."""
        setup = RouterSetup(num_replicas=num_replicas or self.num_replicas, block_size=BLOCK_SIZE)
        return self.plugin(self.plugin.Options.model_validate(dict(self.options)), setup)

    def host(self) -> SimulatedHost:
        """A host with a new router."""
        return SimulatedHost(self.create(), self.num_replicas)

    @pytest.mark.parametrize("seed", range(4))
    def test_chooses_a_replica_that_is_up(self, seed: int) -> None:
        """In any order of events, with replicas that come and go."""
        host, traffic = self.host(), Traffic(seed)
        for _ in range(300):
            replica = traffic.random.randrange(self.num_replicas)
            if traffic.random.random() < 0.05 and host.states[replica].is_up and len(host.up) > 1:
                host.lose(replica, retries=traffic.random.random() < 0.5)
            elif traffic.random.random() < 0.05 and not host.states[replica].is_up:
                host.join(replica)
            traffic.act(host)

    def test_one_replica_takes_all(self) -> None:
        """The only one, and the only one that is up."""
        single, traffic = SimulatedHost(self.create(1), 1), Traffic(1)
        assert {single.send(traffic.request()) for _ in range(20)} == {0}
        host = self.host()
        for replica in range(self.num_replicas - 1):
            host.lose(replica)
        assert {host.send(traffic.request()) for _ in range(20)} == {self.num_replicas - 1}

    def test_a_state_alone_says_that_a_replica_is_down(self) -> None:
        """A replica may take no requests for a while, without having died."""
        host, traffic = self.host(), Traffic(2)
        for _ in range(10):
            host.send(traffic.request())
        host.states[1] = replace(host.states[1], is_up=False)
        for _ in range(40):
            host.send(traffic.request())

    def test_prompts_may_have_no_block(self) -> None:
        """Short ones, and all where the prefix cache is off."""
        host = self.host()
        for number in range(3 * self.num_replicas):
            host.send(RoutedRequest(request_id=str(number), num_prompt_tokens=1, max_tokens=1, block_size=BLOCK_SIZE))

    def test_a_prompt_may_be_its_full_blocks(self) -> None:
        """All of which a replica has."""
        host = self.host()
        hashes = tuple(b"%d" % index for index in range(4))
        for number in range(20):
            host.send(
                RoutedRequest(
                    request_id=str(number),
                    num_prompt_tokens=len(hashes) * BLOCK_SIZE,
                    max_tokens=8,
                    block_size=BLOCK_SIZE,
                    block_hashes=hashes,
                )
            )
            host.compute(str(number))

    def test_the_same_events_give_the_same_choices(self) -> None:
        """In another instance, which saw nothing else: no clock, no random numbers of its own."""
        runs = []
        for _ in range(3):
            host, traffic = self.host(), Traffic(3)
            for _ in range(300):
                traffic.act(host)
            runs.append(host.choices)
        assert runs[0] == runs[1] == runs[2]

    def test_routers_are_apart(self) -> None:
        """A process may have several hosts: what one router hears changes nothing in another."""
        alone, traffic = self.host(), Traffic(4)
        for _ in range(200):
            traffic.act(alone)
        first, second = self.host(), self.host()
        traffic, other = Traffic(4), Traffic(5)
        for _ in range(200):
            traffic.act(first)
            other.act(second)
        assert first.choices == alone.choices

    def test_uses_every_replica(self) -> None:
        """Under load without common prefixes none of them is idle for good."""
        host = self.host()
        for number in range(25 * self.num_replicas):
            hashes = tuple(b"%d/%d" % (number, index) for index in range(4))
            host.send(
                RoutedRequest(
                    request_id=str(number),
                    num_prompt_tokens=4 * BLOCK_SIZE + 1,
                    max_tokens=64,
                    block_size=BLOCK_SIZE,
                    block_hashes=hashes,
                )
            )
        assert set(host.choices) == set(range(self.num_replicas)), f"only {sorted(set(host.choices))} got requests"

    def test_a_replica_that_comes_back_is_used(self) -> None:
        """It has no blocks and no requests."""
        host, traffic = self.host(), Traffic(6)
        for _ in range(100):
            traffic.act(host)
        host.lose(0)
        for _ in range(50):
            traffic.act(host)
        host.join(0)
        first = len(host.choices)
        for _ in range(50 * self.num_replicas):
            host.send(traffic.request())
        assert 0 in host.choices[first:], "a replica that came back got no request"

    def test_replicas_may_be_added(self) -> None:
        """At the end of the list."""
        host, traffic = self.host(), Traffic(7)
        for _ in range(50):
            traffic.act(host)
        host.join(self.num_replicas)
        first = len(host.choices)
        for _ in range(50 * self.num_replicas):
            host.send(traffic.request())
        assert self.num_replicas in host.choices[first:], "a new replica got no request"

    def test_events_may_be_of_what_is_unknown(self) -> None:
        """Blocks may be stored twice and removed twice, requests end that were never placed or computed."""
        host, traffic = self.host(), Traffic(8)
        router = host.router
        for _ in range(50):
            traffic.act(host)
        if isinstance(router, FollowsBlocks):
            router.blocks_stored(0, (b"0/0", b"0/0"))
            router.blocks_stored(0, (b"0/0",))
            router.blocks_removed(0, (b"0/0", b"never"))
            router.blocks_removed(0, (b"0/0",))
            router.all_blocks_cleared(1)
            router.all_blocks_cleared(1)
        if isinstance(router, FollowsRequests):
            router.finished("never")
            for request_id in host.waiting:
                host.finish(request_id)
                router.finished(request_id)
        for _ in range(50):
            traffic.act(host)

    def test_a_request_id_may_come_again(self) -> None:
        """After its end, and where its replica was lost."""
        host, traffic = self.host(), Traffic(9)
        request = traffic.request()
        for _ in range(3):
            replica = host.send(request)
            host.compute(request.request_id)
            host.finish(request.request_id)
        replica = host.send(request)
        host.lose(replica)
        assert request.request_id in host.waiting
        host.compute(request.request_id)
        host.finish(request.request_id)

    def test_leaves_its_arguments_alone(self) -> None:
        """They are the host's."""
        router, traffic = self.create(), Traffic(10)
        states = [ReplicaState(index=index, name=f"r{index}") for index in range(self.num_replicas)]
        before = list(states)
        for _ in range(20):
            request = traffic.request()
            copy = replace(request)
            router.choose(request, states)
            assert states == before, "choose changed the list of replicas"
            assert request == copy, "choose changed the request"

    def test_answers_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It does not sleep, open files or connections, or start threads: all requests wait for it."""
        host, traffic = self.host(), Traffic(11)
        for owner, name in _WAITING:
            monkeypatch.setattr(owner, name, _refusal(f"{owner.__name__}.{name}"))
        try:
            for _ in range(100):
                traffic.act(host)
            for replica in range(self.num_replicas - 1):
                host.lose(replica)
        finally:
            monkeypatch.undo()

    def test_forgets_what_has_ended(self) -> None:
        """Requests and blocks come and go for months."""
        host, sizes = self.host(), []
        for turn in range(4):
            traffic = Traffic(100 + turn)
            for _ in range(200):
                traffic.act(host)
            host.end_all()
            gc.collect()
            sizes.append(_num_objects(host.router))
        assert sizes[-1] <= sizes[1] + _SLACK, f"objects that the router holds after 200, 400, ... events: {sizes}"

    def test_forgets_a_lost_replica(self) -> None:
        """Its requests and its blocks."""
        host, sizes = self.host(), []
        for turn in range(4):
            traffic = Traffic(200 + turn)
            for _ in range(60):
                request = traffic.request()
                host.send(request)
                if traffic.random.random() < 0.7:
                    host.compute(request.request_id)
            for replica in range(self.num_replicas):
                host.lose(replica, retries=False)
            for replica in range(self.num_replicas):
                host.join(replica)
            gc.collect()
            sizes.append(_num_objects(host.router))
        assert sizes[-1] <= sizes[1] + _SLACK, (
            f"objects that the router holds each time when all replicas were lost: {sizes}"
        )


_SLACK = 8
"""Objects by which a router may differ that keeps nothing: its numbers."""
_WAITING: Sequence[tuple[Any, str]] = (
    (time, "sleep"),
    (socket, "socket"),
    (threading.Thread, "start"),
    (builtins, "open"),
    (asyncio, "run"),
)


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"the router calls {name} while requests wait for it")

    return refuse


def _num_objects(root: object) -> int:
    """Objects that `root` reaches, but for what belongs to the program (classes, modules, functions), and entries of
    dicts: the collector does not name keys that are text."""
    seen, waiting, num_entries = {id(root)}, [root], 0
    while waiting:
        one = waiting.pop()
        num_entries += len(one) if isinstance(one, dict) else 0
        for found in gc.get_referents(one):
            if id(found) not in seen and not isinstance(found, type | ModuleType | FunctionType):
                seen.add(id(found))
                waiting.append(found)
    return len(seen) + num_entries
