from collections.abc import Callable
from dovetail.contracts.kv import KVLayout
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.scheduler import Schedule, Scheduler, SchedulerLimits
from dovetail.engine.sequence import Sequence
from dovetail.testing.granting import GrantRule, in_full
from random import Random
from typing import TypeVar

VOCAB_SIZE = 3
Answer = TypeVar('Answer')

class SchedulerSimulation:
    def __init__(
        self,
        scheduler: Scheduler,
        limits: SchedulerLimits,
        *,
        windows: tuple[int | None, ...] = (None,),
        block_size: int = 2,
        num_blocks: int = 32,
        num_host_blocks: int = 0,
        prefix_caching: bool = True,
        max_drafts: int = 0,
        max_in_flight: int = 1,
        grants: GrantRule = in_full,
        rng: Random | None = None,
    ): ...
    scheduler: Scheduler
    limits: SchedulerLimits
    layout: KVLayout
    kv: ...
    memory: ...
    worker: ...
    live: list[Sequence]
    finished: list[Sequence]
    num_preemptions: int
    num_steps: int
    @property
    def has_work(self) -> bool: ...
    def longest_request(self) -> int: ...
    def add(
        self,
        prompt: list[int],
        num_output_tokens: int,
        *,
        priority: int = 0,
        num_forks: int = 0,
        salt: bytes = b'',
        sampling: SamplingParams = SamplingParams(),
    ) -> Sequence: ...
    def abort(self, sequence: Sequence) -> None: ...
    def hold(self, sequence: Sequence) -> None: ...
    def resume(self, sequence: Sequence) -> None: ...
    def step(self) -> Schedule: ...
    def run(self, max_steps: int = 10000) -> None: ...
    def run_until(self, holds: Callable[[], bool], what: str) -> None: ...
    def check_idle(self) -> None: ...

def next_token(token_ids: list[int], seed: int) -> int: ...
