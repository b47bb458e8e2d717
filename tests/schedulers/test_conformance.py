"""The bundled schedulers under the suite that third parties run."""

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from dovetail.contracts.scheduler import KVMemory, Schedule
from dovetail.schedulers.batching import BatchingOptions
from dovetail.schedulers.fcfs import FCFSScheduler
from dovetail.schedulers.priority import PriorityScheduler
from dovetail.testing.scheduler_simulation import SchedulerSimulation
from dovetail.testing.scheduler_suite import LIMITS, SchedulerSuite


class TestFCFS(SchedulerSuite):
    plugin = FCFSScheduler


class TestFCFSRecomputing(SchedulerSuite):
    plugin = FCFSScheduler
    options: ClassVar[Mapping[str, Any]] = {"preemption_mode": "recompute", "watermark": 0}


class TestPriority(SchedulerSuite):
    plugin = PriorityScheduler
    options: ClassVar[Mapping[str, Any]] = {"watermark": 0.2}


class Quiet(FCFSScheduler):
    """Does not say who gave way."""

    def schedule(self, memory: KVMemory) -> Schedule:
        schedule = super().schedule(memory)
        schedule.preempted = []
        return schedule


def test_the_suite_finds_a_scheduler_that_does_not_say_who_gave_way():
    simulation = SchedulerSimulation(Quiet(BatchingOptions(watermark=0), LIMITS), LIMITS, num_blocks=11)
    for token in range(3):
        simulation.add([token, 1, 2, 0], 12)
    with pytest.raises(AssertionError, match=r"gave their blocks up and are not in Schedule\.preempted"):
        simulation.run()
