from collections.abc import Mapping
from dovetail.contracts.scheduler import Scheduler, SchedulerLimits
from dovetail.testing.suite import PluginSuite
from typing import Any, ClassVar

LIMITS = SchedulerLimits(max_num_batched_tokens=16, max_num_seqs=8, max_model_len=32)

class SchedulerSuite(PluginSuite):
    kind: ClassVar[str] = 'scheduler'
    plugin: ClassVar[type[Scheduler]]
    options: ClassVar[Mapping[str, Any]] = {}
    def create_scheduler(self, limits: SchedulerLimits) -> Scheduler: ...
