"""An executor that keeps plans in flight as a pipeline does, over one real worker, and checks what it is handed."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from dovetail.contracts.executor import ExecutorNeed, WorkerSpec
from dovetail.contracts.step import DraftTokens, StepPlan, StepResult
from dovetail.executors.cpu import CPUExecutor, CPUOptions


class LateOptions(CPUOptions):
    """How deep the pipeline is said to be."""

    stages: int = 2


class LateFuture(Future[StepResult]):
    """A step that runs when its result is asked for."""

    def __init__(self, executor: LateExecutor):
        super().__init__()
        self._executor = executor

    def result(self, timeout: float | None = None) -> StepResult:
        while not self.done():
            self._executor.run_oldest()
        return super().result(timeout)


class LateExecutor(CPUExecutor):
    """Plans run as late as they can. A shadow of each request is made of plans alone, as stages but the last make it,
    and compared with what was sampled."""

    Options = LateOptions

    def __init__(self, options: Any, spec: WorkerSpec, need: ExecutorNeed):
        super().__init__(options, spec, replace(need, pipeline_parallel=options.stages))
        self.waiting: deque[tuple[StepPlan, LateFuture]] = deque()
        self.depths: list[int] = []
        """Steps in flight, at each plan."""
        self.sizes: list[int] = []
        """Requests in each plan."""
        self.num_sampled = 0
        """Tokens that plans brought."""
        self._shadow: dict[int, list[int]] = {}
        self._truth: dict[int, list[int]] = {}
        self._computed: dict[int, int] = {}

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        self._check(plan)
        future = LateFuture(self)
        self.waiting.append((plan, future))
        self.depths.append(len(self.waiting))
        self.sizes.append(len(plan.seq_ids))
        assert len(self.waiting) <= self.options.stages + 1
        return future

    def run_oldest(self) -> None:
        plan, future = self.waiting.popleft()
        try:
            result = super().execute(plan).result()
        except Exception as error:
            future.set_exception(error)
            return
        tokens = iter(result.token_ids)
        counts = result.counts or [1] * len(plan.seq_ids)
        drafts = plan.num_drafts or [0] * len(plan.seq_ids)
        for seq_id, count, num_drafts in zip(plan.seq_ids, counts, drafts, strict=True):
            self._truth[seq_id] += [next(tokens) for _ in range(count)]
            if num_drafts:
                self._computed[seq_id] -= num_drafts - (count - 1)
        # A worker alone returns no drafts, since it has them: these stand for them.
        drafts_of = {index: DraftTokens(list(range(number))) for index, number in result.num_next_drafts.items()}
        future.set_result(replace(result, next_drafts=drafts_of))

    def _check(self, plan: StepPlan) -> None:
        for seq_id in (*plan.finished, *plan.preempted):
            self._shadow.pop(seq_id, None)
        for new in plan.new_requests:
            self._shadow[new.seq_id] = list(new.token_ids)
            self._truth[new.seq_id] = list(new.token_ids)
            self._computed[new.seq_id] = new.num_computed_tokens
        for seq_id, token_ids in plan.sampled:
            self._shadow[seq_id] += token_ids
            self.num_sampled += len(token_ids)
        drafts = plan.num_drafts or [0] * len(plan.seq_ids)
        for seq_id, count, num_drafts in zip(plan.seq_ids, plan.num_tokens, drafts, strict=True):
            assert self._shadow[seq_id] == self._truth[seq_id], "stages know other tokens than were sampled"
            self._computed[seq_id] += count
            # Every token that is computed is known: so no request's next token is in flight.
            assert self._computed[seq_id] - num_drafts <= len(self._shadow[seq_id])
        brought = {seq_id: len(guesses.token_ids) for seq_id, guesses in plan.draft_tokens}
        assert brought == {seq_id: count for seq_id, count in zip(plan.seq_ids, drafts, strict=True) if count}
        self._check_following(plan)

    def _check_following(self, plan: StepPlan) -> None:
        """Requests that are in several steps in flight compute parts of what is known."""
        for earlier, _ in self.waiting:
            for seq_id in set(earlier.seq_ids) & set(plan.seq_ids):
                assert self._computed[seq_id] <= len(self._shadow[seq_id])
                assert plan.num_tokens[plan.seq_ids.index(seq_id)] >= 1
