"""The bundled schedulers under the suite that third parties run."""

from dovetail.contracts.scheduler import Scheduler, SchedulerLimits
from dovetail.schedulers.batching import BatchingOptions
from dovetail.schedulers.fcfs import FCFSScheduler
from dovetail.schedulers.priority import PriorityScheduler
from dovetail.testing.scheduler_suite import SchedulerSuite


class TestFCFS(SchedulerSuite):
    def create_scheduler(self, limits: SchedulerLimits) -> Scheduler:
        return FCFSScheduler(BatchingOptions(), limits)


class TestFCFSRecomputing(SchedulerSuite):
    def create_scheduler(self, limits: SchedulerLimits) -> Scheduler:
        return FCFSScheduler(BatchingOptions(preemption_mode="recompute", watermark=0), limits)


class TestPriority(SchedulerSuite):
    def create_scheduler(self, limits: SchedulerLimits) -> Scheduler:
        return PriorityScheduler(BatchingOptions(watermark=0.2), limits)
