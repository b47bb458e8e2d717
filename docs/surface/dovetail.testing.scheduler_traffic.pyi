from collections.abc import Callable
from dovetail.contracts.scheduler import Scheduler, SchedulerLimits
from dovetail.testing.granting import GrantRule
from dovetail.testing.scheduler_simulation import SchedulerSimulation
from random import Random

def random_grants(limits: SchedulerLimits, rng: Random) -> GrantRule: ...
def random_simulation(
    create_scheduler: Callable[[SchedulerLimits], Scheduler],
    rng: Random,
    *,
    num_host_blocks: int | None = None,
) -> SchedulerSimulation: ...
def run_random_traffic(
    simulation: SchedulerSimulation,
    rng: Random,
    *,
    num_requests: int = 12,
) -> None: ...
