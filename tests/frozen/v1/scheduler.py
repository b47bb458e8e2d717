"""First come, first served; the last to come is preempted."""

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.scheduler import KVMemory, RequestState, RequestStatus, Schedule, Scheduler, SchedulerLimits


class Frozen(Scheduler):
    contract = (1, 0)
    preference = -100

    def __init__(self, options: PluginOptions, limits: SchedulerLimits):
        super().__init__(options, limits)
        self._requests: list[RequestState] = []
        self._num_partial = 0

    @property
    def num_running(self) -> int:
        return sum(request.status is RequestStatus.RUNNING for request in self._requests)

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - self.num_running

    def add(self, request: RequestState) -> None:
        self._requests.append(request)

    def remove(self, request: RequestState) -> None:
        self._requests.remove(request)

    def schedule(self, memory: KVMemory) -> Schedule:
        schedule = self._attempt(Schedule(), memory)
        while not schedule.requests:
            held = [each for each in self._requests if each.is_held and each.status is RequestStatus.RUNNING]
            if not held or not any(each.num_wanted_tokens for each in self._requests):
                break
            self._preempt(held[-1], schedule, memory)
            self._attempt(schedule, memory)
        return schedule

    def _attempt(self, schedule: Schedule, memory: KVMemory) -> Schedule:
        self._num_partial = 0
        for request in self._requests:
            if request.status is RequestStatus.RUNNING and request.num_wanted_tokens:
                self._continue(request, schedule, memory)
        for request in self._requests:
            if request.is_held or request.status is RequestStatus.RUNNING or request in schedule.preempted:
                continue
            if self.num_running == self.limits.max_num_seqs or not self._admit(request, schedule, memory):
                break
        return schedule

    def _continue(self, request: RequestState, schedule: Schedule, memory: KVMemory) -> None:
        count = self._count(request, schedule)
        while count and not self._take(request, count, schedule, memory):
            later = self._requests[self._requests.index(request) + 1 :]
            running = [each for each in later if each.status is RequestStatus.RUNNING]
            if not running or not memory.num_missing_blocks(request, count):
                return
            self._preempt(running[-1], schedule, memory)

    def _admit(self, request: RequestState, schedule: Schedule, memory: KVMemory) -> bool:
        """False: those behind it wait, too."""
        if memory.awaits_prefix(request):
            return True
        memory.attach_prefix(request)
        count = self._count(request, schedule)
        if count and self._take(request, count, schedule, memory):
            request.status = RequestStatus.RUNNING
            return True
        memory.release(request)
        return False

    def _count(self, request: RequestState, schedule: Schedule) -> int:
        """Tokens to ask for."""
        limits, wanted = self.limits, request.num_wanted_tokens
        known = request.num_tokens - request.num_computed_tokens
        count = min(wanted, limits.max_num_batched_tokens - sum(schedule.num_tokens))
        if 0 < limits.long_prefill_token_threshold < known:
            count = min(count, limits.long_prefill_token_threshold)
        if count < known:
            is_cut_by_choice = not limits.enable_chunked_prefill and known <= limits.max_num_batched_tokens
            if is_cut_by_choice or self._num_partial:
                return 0
        return count

    def _take(self, request: RequestState, count: int, schedule: Schedule, memory: KVMemory) -> bool:
        granted = memory.grant(request, count)
        if granted:
            self._num_partial += count < request.num_tokens - request.num_computed_tokens
            schedule.requests.append(request)
            schedule.num_tokens.append(granted)
        return granted > 0

    def _preempt(self, request: RequestState, schedule: Schedule, memory: KVMemory) -> None:
        memory.release(request)
        request.status = RequestStatus.PREEMPTED
        schedule.preempted.append(request)
