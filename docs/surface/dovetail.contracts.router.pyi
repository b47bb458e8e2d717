from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from dovetail.contracts.plugin import Plugin, PluginOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRequest:
    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    block_size: int
    block_hashes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    index: int
    name: str
    is_up: bool = True
    num_waiting: int = 0
    num_running: int = 0
    waiting_prompt_tokens: int = 0
    running_prompt_tokens: int = 0
    kv_usage: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RouterSetup:
    num_replicas: int
    block_size: int


class Router(Plugin):
    def __init__(self, options: PluginOptions, setup: RouterSetup): ...
    options: PluginOptions
    setup: RouterSetup
    @abstractmethod
    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> int: ...


class FollowsRequests(Router):
    @abstractmethod
    def prefilled(self, request_id: str) -> None: ...
    @abstractmethod
    def finished(self, request_id: str) -> None: ...
    @abstractmethod
    def replica_lost(self, replica: int) -> None: ...


class FollowsBlocks(Router):
    @abstractmethod
    def blocks_stored(self, replica: int, block_hashes: Sequence[bytes]) -> None: ...
    @abstractmethod
    def blocks_removed(self, replica: int, block_hashes: Sequence[bytes]) -> None: ...
    @abstractmethod
    def all_blocks_cleared(self, replica: int) -> None: ...
    @abstractmethod
    def replica_lost(self, replica: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksStored:
    block_hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    adapter: str | None = None
    medium: str = 'GPU'


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksRemoved:
    block_hashes: tuple[bytes, ...]
    medium: str = 'GPU'


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    ...

CacheEvent = BlocksStored | BlocksRemoved | AllBlocksCleared
def report_event(router: Router, replica: int, event: CacheEvent) -> None: ...
def choose_replica(
    router: Router,
    name: str,
    request: RoutedRequest,
    replicas: Sequence[ReplicaState],
) -> int: ...
