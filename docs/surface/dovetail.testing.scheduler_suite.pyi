from abc import ABC, abstractmethod
from dovetail.contracts.scheduler import Scheduler, SchedulerLimits

LIMITS = SchedulerLimits(max_num_batched_tokens=16, max_num_seqs=8, max_model_len=32)

class SchedulerSuite(ABC):
    @abstractmethod
    def create_scheduler(self, limits: SchedulerLimits) -> Scheduler: ...
