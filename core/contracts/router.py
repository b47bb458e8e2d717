"""Router: which replica of an engine takes a request.

The host runs several replicas of one engine and has one router, in one event loop. Every call is synchronous and must
return at once: no I/O, no waiting. Every router has

    choose(request, replicas)         -> the index of the replica that gets the request

What happens to requests is reported to a router that derives from `FollowsRequests`:

    prefilled(request_id)             its first output token came: the prompt is computed
    finished(request_id)              it ended, was aborted, or failed; nothing of it is left
    replica_lost(replica)             the replica died, with its requests

and what the replicas' prefix caches have, in the order in which it changed, to one that derives from `FollowsBlocks`:

    blocks_stored(replica, hashes)    the replica's prefix cache has these blocks now
    blocks_removed(replica, hashes)   it has them no longer
    all_blocks_cleared(replica)       it has none any more
    replica_lost(replica)             the replica died, with its blocks

Blocks of a prompt are reported as stored before `prefilled` of its request. When a replica is lost, its requests are at
no replica any more: the host calls `choose` again for those that it retries, and `finished` for all others. Events of
a lost replica do not come until it is up again, with no blocks. Replicas may be added at the end of the list.

Answers depend on the options, the setup and these calls alone: no clock, no random numbers without a seed in the
options, no other state. The same calls give the same answers in every process.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.contracts.errors import PluginError
from dovetail.contracts.plugin import Plugin, PluginOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRequest:
    """What a router may know of a request."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    """Most tokens that it may generate; how many it will is not known."""
    block_size: int
    """Tokens per block."""
    block_hashes: tuple[bytes, ...] = ()
    """Hashes of the prompt's full blocks, in order of positions. Each covers all tokens before it, the adapter and the
    salt, so a replica can use a block only where it has all before it too. Empty where the prefix cache is off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """One replica, as the host sees it: it counts what it sent and what came back."""

    index: int
    """The replica's position in the list, which is how calls name it. It keeps it while it lives."""
    name: str
    """For messages."""
    is_up: bool = True
    """Whether it takes requests."""
    num_waiting: int = 0
    """Requests sent to it whose first output token has not come."""
    num_running: int = 0
    """Requests whose first output token came, and that did not end."""
    waiting_prompt_tokens: int = 0
    """Prompt tokens of the waiting requests, cached ones included."""
    running_prompt_tokens: int = 0
    """Prompt tokens of the running requests."""
    kv_usage: float = 0.0
    """Share of its KV blocks that requests hold, 0 to 1, as it reported last."""


@dataclass(frozen=True, kw_only=True)
class RouterSetup:
    """What a router is created with."""

    num_replicas: int
    """Replicas at the start, without blocks. More may be added."""
    block_size: int
    """Tokens per block of the prefix cache."""


class Router(Plugin):
    """Decides which replica takes a request. One instance serves all requests of a host."""

    def __init__(self, options: PluginOptions, setup: RouterSetup):
        self.options = options
        self.setup = setup

    @abstractmethod
    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> int:
        """Returns the index of the replica that takes the request; it must be up.

        At least one of `replicas` is up; `replicas[i].index == i`. The host sends the request there at once. A
        request_id comes again only after `finished`, or after `replica_lost` of the replica that had the request.
        """


class FollowsRequests(Router):
    """A router that hears what becomes of requests."""

    @abstractmethod
    def prefilled(self, request_id: str) -> None:
        """The request's prompt is computed. Does not come for a request that ends before."""

    @abstractmethod
    def finished(self, request_id: str) -> None:
        """The request is at no replica any more. An id that was never heard of may come."""

    @abstractmethod
    def replica_lost(self, replica: int) -> None:
        """The replica died, with its requests and its blocks."""


class FollowsBlocks(Router):
    """A router that hears what the replicas' prefix caches have. Replicas publish it only where the router is one."""

    @abstractmethod
    def blocks_stored(self, replica: int, block_hashes: Sequence[bytes]) -> None:
        """The replica has these blocks. Some of them may have been reported before."""

    @abstractmethod
    def blocks_removed(self, replica: int, block_hashes: Sequence[bytes]) -> None:
        """The replica has these blocks no longer. Some of them may never have been reported."""

    @abstractmethod
    def all_blocks_cleared(self, replica: int) -> None:
        """The replica has no blocks any more. Its requests go on."""

    @abstractmethod
    def replica_lost(self, replica: int) -> None:
        """The replica died, with its requests and its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksStored:
    """Consecutive full blocks of one sequence that the prefix cache finds from now on. Where it says what a cache has
    already (after `AllBlocksCleared`, to a listener that came late) it has the hashes alone: any blocks, in no order,
    with no tokens and no parent."""

    block_hashes: tuple[bytes, ...]
    """At least one, in order of positions."""
    parent_hash: bytes | None
    """Hash of the block before the first of them; None where that one begins the sequence."""
    token_ids: tuple[int, ...]
    """Tokens of all the blocks, `len(block_hashes) * block_size` of them; empty where hashes alone are published."""
    block_size: int
    """Tokens per block."""
    adapter: str | None = None
    """Name of the LoRA adapter that the blocks were computed with."""
    medium: str = "GPU"
    """Where they are, in vLLM's words. "GPU": the memory that the engine computes in, of whatever device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksRemoved:
    """Blocks that the prefix cache does not find any more."""

    block_hashes: tuple[bytes, ...]
    medium: str = "GPU"
    """As in `BlocksStored`."""


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The prefix cache finds nothing any more: it was reset, or the weights changed."""


CacheEvent = BlocksStored | BlocksRemoved | AllBlocksCleared
"""A change of what a prefix cache finds."""


def report_event(router: Router, replica: int, event: CacheEvent) -> None:
    """Reports a replica's KV event to a router that follows blocks; others hear nothing of it."""
    if not isinstance(router, FollowsBlocks):
        return
    if isinstance(event, BlocksStored):
        router.blocks_stored(replica, event.block_hashes)
    elif isinstance(event, BlocksRemoved):
        router.blocks_removed(replica, event.block_hashes)
    else:
        router.all_blocks_cleared(replica)


def choose_replica(router: Router, name: str, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> int:
    """Has `router` choose, for a host: the index of the replica that gets the request. `name`: the router's, for
    messages. Raises `PluginError` where the router raises, or returns what is no integer (numpy's are), or the index of
    a replica that there is not or that takes no requests."""
    try:
        answer = router.choose(request, replicas)
    except Exception as error:
        raise PluginError(f"router {name} raised {type(error).__name__}: {error}") from error
    broken = f"router {name} breaks the router's contract"
    try:
        chosen = operator.index(answer)
    except TypeError as error:
        raise PluginError(f"{broken}: choose returned {answer!r:.200}, which is no integer") from error
    if not 0 <= chosen < len(replicas):
        raise PluginError(f"{broken}: it chose replica {chosen}, and there are {len(replicas)}, numbered from 0")
    if not replicas[chosen].is_up:
        raise PluginError(f"{broken}: it chose replica {chosen}, which is not up")
    return chosen
