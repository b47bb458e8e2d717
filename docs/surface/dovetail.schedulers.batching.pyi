from abc import abstractmethod
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.scheduler import KVMemory, RequestState, Schedule, Scheduler, SchedulerLimits
from dovetail.schedulers.ranked_queue import Rank
from pydantic import Field
from typing import ClassVar, Literal


class BatchingOptions(PluginOptions):
    preemption_mode: Literal['auto', 'recompute'] = 'auto'
    watermark: float = Field(default=0.01, ge=0, lt=1)


class BatchingScheduler(Scheduler):
    contract: ClassVar[tuple[int, int]] = (1, 0)
    Options: ClassVar[type[PluginOptions]] = BatchingOptions
    def __init__(self, options: BatchingOptions, limits: SchedulerLimits): ...
    @abstractmethod
    def rank(self, request: RequestState) -> Rank: ...
    def outranks(self, waiting: RequestState, running: RequestState) -> bool: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    def add(self, request: RequestState) -> None: ...
    def remove(self, request: RequestState) -> None: ...
    def schedule(self, memory: KVMemory) -> Schedule: ...
