from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from dovetail.contracts.device import Runtime
from dovetail.contracts.kv import KVLayout, LayerCache
from dovetail.contracts.plugin import Environment, Plugin, PluginOptions
from dovetail.contracts.step import StepPlan, StepResult
from typing import Any, ClassVar, Final, Protocol


@dataclass(frozen=True, kw_only=True)
class ExecutorCapabilities:
    device_types: frozenset[str] | None = frozenset()
    tensor_parallel: int | None = 1
    pipeline_parallel: int | None = 1
    enforce_eager: bool = False


@dataclass(frozen=True)
class ExecutorNeed:
    device_type: str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    enforce_eager: bool = False
    max_num_seqs: int | None = None
    num_replicas: int = 1
    @property
    def num_ranks(self) -> int: ...


@dataclass(frozen=True)
class ThreadCount:
    count: int
    reason: str

ANSWERING_TENSOR_RANK: Final = 0

@dataclass(frozen=True, kw_only=True)
class WorkerLayout:
    tensor_parallel: int = 1
    num_stages: int = 1
    positions: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    @property
    def num_ranks(self) -> int: ...
    @property
    def answering_rank(self) -> int: ...
    def position(self, rank: int) -> int: ...
    def ranks_of_stage(self, stage: int) -> tuple[int, ...]: ...
    def placements(
        self,
        devices: Sequence[str],
        *,
        init_method: str | None = None,
        runtime: Runtime | None = None,
    ) -> list[Placement]: ...


@dataclass(frozen=True, kw_only=True)
class Placement:
    device: str
    rank: int = 0
    layout: WorkerLayout = WorkerLayout()
    init_method: str | None = None
    runtime: Runtime | None = None
    @property
    def position(self) -> int: ...
    @property
    def tensor_rank(self) -> int: ...
    @property
    def tensor_parallel(self) -> int: ...
    @property
    def stage(self) -> int: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def node(self) -> int: ...
    @property
    def answers(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class ExpectedWorkers:
    layout: WorkerLayout
    devices: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    transport: str | None = None
    def node(self, rank: int) -> str: ...
    def device(self, rank: int) -> str: ...


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    rank: int
    stage: int
    tensor_rank: int
    node: str = ''
    device: str = ''
    pid: int | None = None
    is_alive: bool = True
    silent_s: float | None = None
    memory_bytes: int | None = None
    device_bytes: int | None = None
    num_steps: int | None = None
    busy_s: float | None = None
    last_step_s: float | None = None
    running_s: float | None = None


@dataclass(frozen=True)
class StagedKVLayout(KVLayout):
    stages: tuple[KVLayout, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    placement: Placement
    caches: tuple[LayerCache, ...]
    available_bytes: int
    extra_caches: Mapping[str, tuple[LayerCache, ...]] = field(default_factory=dict)


class PendingStep(Protocol):
    def result(self) -> StepResult: ...


class Worker(Protocol):
    def load(self) -> None: ...
    def execute(self, plan: StepPlan) -> StepResult: ...
    def submit(self, plan: StepPlan) -> PendingStep | StepResult: ...
    def call(self, method: str, *args: Any) -> Any: ...
    def close(self) -> None: ...


class WorkerSpec(Protocol):
    @property
    def num_threads(self) -> int | None: ...
    def create(self, placement: Placement) -> Worker: ...


class Executor(Plugin):
    capabilities: ClassVar[ExecutorCapabilities] = ExecutorCapabilities()
    max_in_flight: ClassVar[int] = 1
    is_interruptible: ClassVar[bool] = False
    def __init__(self, options: PluginOptions, spec: WorkerSpec, need: ExecutorNeed): ...
    options: PluginOptions
    spec: WorkerSpec
    need: ExecutorNeed
    @classmethod
    def environment(cls, options: Any, environment: Environment) -> Environment: ...
    @classmethod
    def threads(
        cls,
        need: ExecutorNeed,
        options: Any,
        environment: Environment,
    ) -> ThreadCount | None: ...
    @classmethod
    def expected_workers(cls, need: ExecutorNeed, options: Any) -> ExpectedWorkers: ...
    @abstractmethod
    def start(self) -> None: ...
    @abstractmethod
    def execute(self, plan: StepPlan) -> Future[StepResult]: ...
    @abstractmethod
    def call(self, method: str, *args: Any) -> list[Any]: ...
    def rank_status(self) -> tuple[RankStatus, ...]: ...
    @abstractmethod
    def shutdown(self) -> None: ...
