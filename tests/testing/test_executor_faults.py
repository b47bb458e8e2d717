"""What the executor suite finds: each a change in an executor that passes."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from dovetail.contracts.errors import WorkerError
from dovetail.contracts.executor import (
    Executor,
    ExecutorCapabilities,
    ExecutorNeed,
    ExpectedWorkers,
    Placement,
    RankStatus,
    Worker,
    WorkerLayout,
)
from dovetail.contracts.step import StepPlan, StepResult
from dovetail.testing.executor_suite import ExecutorSuite
from dovetail.testing.faults import Fault, check_fault
from dovetail.testing.toy_worker import ToySpec, ToyWorker


class InAThread(Executor):
    """Workers in one thread, in turn; the last rank has the first position, so that with several it answers."""

    contract = (1, 0)
    capabilities = ExecutorCapabilities(
        device_types=frozenset({"cpu"}), tensor_parallel=None, pipeline_parallel=None, enforce_eager=True
    )
    num_pool_threads: ClassVar[int] = 1
    _workers: tuple[Worker, ...] = ()

    def start(self) -> None:
        self._pool = ThreadPoolExecutor(self.num_pool_threads, initializer=self.prepare)
        try:
            self._workers = self._pool.submit(self.build).result()
        except BaseException:
            self._pool.shutdown()
            raise

    def prepare(self) -> None:
        if self.spec.num_threads is not None:
            torch.set_num_threads(self.spec.num_threads)

    def placements(self) -> list[Placement]:
        size = self.need.tensor_parallel * self.need.pipeline_parallel
        layout = WorkerLayout(
            tensor_parallel=self.need.tensor_parallel,
            num_stages=self.need.pipeline_parallel,
            positions=tuple(reversed(range(size))),
        )
        return layout.placements(["cpu"] * size, init_method="file:///unused")

    def build(self) -> tuple[Worker, ...]:
        workers = tuple(self.spec.create(placement) for placement in self.placements())
        for worker in workers:
            worker.load()
        return workers

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        return self._pool.submit(self.run, self.workers(), plan)

    def run(self, workers: tuple[Worker, ...], plan: StepPlan) -> StepResult:
        results = [worker.execute(plan) for worker in workers]
        return self.choose(results)

    def choose(self, results: list[StepResult]) -> StepResult:
        return results[self.placements()[0].layout.answering_rank]

    def call(self, method: str, *args: Any) -> list[Any]:
        return [self._pool.submit(worker.call, method, *args).result() for worker in self.workers()]

    def workers(self) -> tuple[Worker, ...]:
        if not self._workers:
            raise WorkerError("it does not run", rank=0)
        return self._workers

    def shutdown(self) -> None:
        workers, self._workers = self._workers, ()
        if workers:
            self.close(workers)
            self._pool.shutdown()

    def close(self, workers: tuple[Worker, ...]) -> None:
        for worker in workers:
            self._pool.submit(worker.close).result()


class DeclaresNothing(InAThread):
    capabilities = ExecutorCapabilities()


class TwoThreads(InAThread):
    """The second plan overtakes the first."""

    num_pool_threads = 2

    def start(self) -> None:
        self.has_overtaken = threading.Event()
        super().start()

    def run(self, workers: tuple[Worker, ...], plan: StepPlan) -> StepResult:
        if plan.step_id == 0:
            self.has_overtaken.wait(60)
        result = super().run(workers, plan)
        if plan.step_id == 1:
            self.has_overtaken.set()
        return result


class FourThreads(TwoThreads):
    num_pool_threads = 4


class CallsAtOnce(InAThread):
    """The second step lasts until a call has met it."""

    def start(self) -> None:
        self.is_inside, self.was_met = threading.Event(), threading.Event()
        super().start()

    def run(self, workers: tuple[Worker, ...], plan: StepPlan) -> StepResult:
        if plan.step_id == 1:
            assert isinstance(workers[0], ToyWorker)
            with workers[0]._alone("step 1"):
                self.is_inside.set()
                self.was_met.wait(60)
        return super().run(workers, plan)

    def call(self, method: str, *args: Any) -> list[Any]:
        self.is_inside.wait(60)
        try:
            return [worker.call(method, *args) for worker in self.workers()]
        finally:
            self.was_met.set()


class NeverCloses(InAThread):
    def close(self, workers: tuple[Worker, ...]) -> None:
        return


class LoadsTwice(InAThread):
    def build(self) -> tuple[Worker, ...]:
        workers = super().build()
        for worker in workers:
            worker.load()
        return workers


class SleepsAlone(InAThread):
    """Answers for its worker."""

    def call(self, method: str, *args: Any) -> list[Any]:
        answers = {"sleep": lambda level: 1000 * level, "wake_up": lambda: None}
        return [answers[method](*args)] if method in answers else super().call(method, *args)


class IgnoresThreads(InAThread):
    def prepare(self) -> None:
        torch.set_num_threads(1)


class OwnThreads(InAThread):
    def prepare(self) -> None:
        torch.set_num_threads(2)


class HidesErrors(InAThread):
    def execute(self, plan: StepPlan) -> Future[StepResult]:
        future = super().execute(plan)
        done: Future[StepResult] = Future()
        done.set_result(StepResult(plan.step_id, []) if future.exception() else future.result())
        return done


class ChangesErrors(InAThread):
    def start(self) -> None:
        try:
            super().start()
        except Exception as error:
            raise RuntimeError(str(error)) from None


class LeavesItsThread(InAThread):
    def shutdown(self) -> None:
        workers, self._workers = self._workers, ()
        if workers:
            self.close(workers)
            self.kept.append(self._pool)

    kept: ClassVar[list[ThreadPoolExecutor]] = []


class GoesOnAfterShutdown(InAThread):
    def shutdown(self) -> None:
        workers = self._workers
        super().shutdown()
        self._workers, self._pool = workers, ThreadPoolExecutor(1)

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        future.set_result(self.run(self.workers(), plan))
        return future


class ClosesTwice(InAThread):
    def shutdown(self) -> None:
        self.close(self.workers())
        self._workers = ()
        self._pool.shutdown()


class FewerWorkers(InAThread):
    """Knows of one rank."""

    def placements(self) -> list[Placement]:
        return [Placement(device="cpu")]


class SpeaksForMissingWorkers(FewerWorkers):
    def call(self, method: str, *args: Any) -> list[Any]:
        return super().call(method, *args) * self.need.tensor_parallel


class AllAreTheFirst(InAThread):
    """Two workers that both think they answer."""

    def placements(self) -> list[Placement]:
        return [replace(placement, rank=1) for placement in super().placements()]


class LayoutsDiffer(InAThread):
    """Two workers with one share of the layers: tensor rank 0 twice."""

    def placements(self) -> list[Placement]:
        first, last = super().placements()
        return [replace(first, layout=WorkerLayout(tensor_parallel=2)), last]

    def choose(self, results: list[StepResult]) -> StepResult:
        return results[0]


class StagesForShares(InAThread):
    """Two stages, where two workers were to share the layers of one."""

    def placements(self) -> list[Placement]:
        return WorkerLayout(num_stages=2).placements(["cpu"] * 2, init_method="file:///unused")


class IgnoresStages(InAThread):
    """Starts as many workers as share one layer."""

    def placements(self) -> list[Placement]:
        return WorkerLayout(tensor_parallel=self.need.tensor_parallel).placements(["cpu"], init_method=None)


class SharesForStages(InAThread):
    """Two workers that share all layers, where each was to have some."""

    def placements(self) -> list[Placement]:
        return WorkerLayout(tensor_parallel=2).placements(["cpu"] * 2, init_method="file:///unused")

    def build(self) -> tuple[Worker, ...]:
        assert isinstance(self.spec, ToySpec)
        spec = replace(self.spec, passes_on=False)  # one process has no group of two ranks
        return tuple(spec.create(placement) for placement in self.placements())


class NoRendezvous(InAThread):
    def placements(self) -> list[Placement]:
        return [replace(placement, init_method=None) for placement in super().placements()]


class FirstRankAnswers(InAThread):
    def choose(self, results: list[StepResult]) -> StepResult:
        return results[0]


class AnswersBackwards(InAThread):
    def call(self, method: str, *args: Any) -> list[Any]:
        return super().call(method, *args)[::-1]


class NothingInFlight(InAThread):
    max_in_flight = 0


class ExpectsOneRank(InAThread):
    @classmethod
    def expected_workers(cls, need: ExecutorNeed, options: Any) -> ExpectedWorkers:
        return ExpectedWorkers(layout=WorkerLayout())


class ExpectsOtherDevices(InAThread):
    @classmethod
    def expected_workers(cls, need: ExecutorNeed, options: Any) -> ExpectedWorkers:
        layout = super().expected_workers(need, options).layout
        return ExpectedWorkers(layout=layout, devices=tuple(f"cpu:{rank}" for rank in range(layout.num_ranks)))


class ShowsStatus(InAThread):
    def rank_status(self) -> tuple[RankStatus, ...]:
        places = self.placements()
        return tuple(RankStatus(rank=one.rank, stage=one.stage, tensor_rank=one.tensor_rank) for one in places)


class ShowsStatusBackwards(ShowsStatus):
    def rank_status(self) -> tuple[RankStatus, ...]:
        return super().rank_status()[::-1]


class ShowsOneStatus(ShowsStatus):
    def rank_status(self) -> tuple[RankStatus, ...]:
        return super().rank_status()[:1]


class ShowsAllAsEnded(ShowsStatus):
    def rank_status(self) -> tuple[RankStatus, ...]:
        return tuple(replace(one, is_alive=False) for one in super().rank_status())


class AsksWorkersForTheirStatus(ShowsStatus):
    def rank_status(self) -> tuple[RankStatus, ...]:
        self.call("ping")
        return super().rank_status()


LIFE = "test_a_worker_is_created_loaded_and_closed_once"
RANKS = "test_there_is_a_worker_for_every_rank"
CALLS = "test_calls_answer_in_rank_order"
SHARES = "test_workers_share_the_model_without_gaps"
RESULT = "test_a_result_is_that_of_the_rank_that_answers"
EXPECTED = "test_workers_are_where_they_were_expected"
STATUS = "test_the_status_has_each_rank_in_order"
STAGES = "test_stages_pass_on_what_they_computed"
THREADS = "test_workers_have_the_threads_that_the_spec_names"
FAULTS = [
    Fault("declares nothing", DeclaresNothing, "test_declares_what_it_runs"),
    Fault("runs plans in a pool of 2 threads", TwoThreads, "test_results_come_in_the_order_of_plans"),
    Fault("runs plans in a pool of 4 threads", FourThreads, "test_results_come_in_the_order_of_plans"),
    Fault("calls a worker during its step", CallsAtOnce, "test_a_call_meets_no_step"),
    Fault("never closes its worker", NeverCloses, LIFE),
    Fault("loads twice", LoadsTwice, LIFE),
    Fault("answers sleep and wake_up by itself", SleepsAlone, LIFE),
    Fault("ignores num_threads", IgnoresThreads, THREADS),
    Fault("has two threads whatever is said", OwnThreads, "test_ranks_reduce_together"),
    Fault("hides an error of a step", HidesErrors, "test_an_error_in_a_step_reaches_the_caller"),
    Fault("changes the type of an error", ChangesErrors, "test_start_raises_what_the_last_rank_raised"),
    Fault("leaves a thread behind", LeavesItsThread, CALLS),
    Fault("goes on after its shutdown", GoesOnAfterShutdown, "test_shutdown_is_idempotent_and_final"),
    Fault("cannot be shut down twice", ClosesTwice, "test_shutdown_is_idempotent_and_final"),
    Fault("answers calls in another order", AnswersBackwards, CALLS),
    Fault("has fewer workers than ranks", FewerWorkers, RANKS),
    Fault("answers for workers that it lacks", SpeaksForMissingWorkers, RANKS),
    Fault("has two ranks that answer", AllAreTheFirst, SHARES),
    Fault("gives two workers one tensor rank", LayoutsDiffer, SHARES),
    Fault("makes stages of what should share layers", StagesForShares, SHARES),
    Fault("ignores pipeline stages", IgnoresStages, STAGES),
    Fault("makes shares of what should be stages", SharesForStages, STAGES),
    Fault("gives several ranks no rendezvous", NoRendezvous, SHARES),
    Fault("expects fewer workers than it starts", ExpectsOneRank, EXPECTED),
    Fault("expects workers on other devices", ExpectsOtherDevices, EXPECTED),
    Fault("shows the status of ranks in another order", ShowsStatusBackwards, STATUS),
    Fault("shows the status of one rank", ShowsOneStatus, STATUS),
    Fault("shows ranks that run as ended", ShowsAllAsEnded, STATUS),
    Fault("asks workers that are gone for their status", AsksWorkersForTheirStatus, STATUS),
    Fault("returns what another rank than the answering one has", FirstRankAnswers, RESULT),
    Fault("takes no plan at all", NothingInFlight, "test_declares_its_contract"),
]
TWO_RANKS = {
    SHARES,
    RESULT,
    EXPECTED,
    STATUS,
    "test_there_is_a_worker_for_every_rank",
    "test_calls_answer_in_rank_order",
}
"""Tests in which a fault shows with several ranks only."""


@pytest.fixture(autouse=True)
def _threads_stay() -> Any:
    """What faulty executors leave behind ends with the test."""
    yield
    while LeavesItsThread.kept:
        LeavesItsThread.kept.pop().shutdown()


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_finds_an_executor_that(fault: Fault) -> None:
    check_fault(fault, ExecutorSuite, plugin=fault.plugin, tensor_parallel=2 if fault.test in TWO_RANKS else 1)


class TestInAThread(ExecutorSuite):
    plugin = InAThread

    def test_stages_pass_on_what_they_computed(self) -> None:
        pytest.skip("the ranks of one process have no process group")


class TestAnotherRankAnswers(ExecutorSuite):
    """Two stages of two ranks, and the first rank is the last of the last stage: the second one answers."""

    plugin = InAThread
    tensor_parallel = 2
    pipeline_parallel = 2

    def test_ranks_reduce_together(self) -> None:
        pytest.skip("the ranks of one process have no process group")

    test_stages_pass_on_what_they_computed = test_ranks_reduce_together
