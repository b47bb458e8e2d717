"""What the executor suite finds: each a change in an executor that passes."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch

from dovetail.contracts.errors import WorkerError
from dovetail.contracts.executor import Executor, Placement, Worker
from dovetail.contracts.step import StepPlan, StepResult
from dovetail.testing.executor_suite import ExecutorSuite
from dovetail.testing.faults import Fault, check_fault


class InAThread(Executor):
    """One worker in a thread of its own."""

    contract = (1, 0)
    num_pool_threads: ClassVar[int] = 1
    _worker: Worker | None = None

    def start(self) -> None:
        self._pool = ThreadPoolExecutor(self.num_pool_threads, initializer=self.prepare)
        try:
            self._worker = self._pool.submit(self.build).result()
        except BaseException:
            self._pool.shutdown()
            raise

    def prepare(self) -> None:
        if self.spec.num_threads is not None:
            torch.set_num_threads(self.spec.num_threads)

    def build(self) -> Worker:
        worker = self.spec.create(Placement(0, 1, "cpu"))
        worker.load()
        return worker

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        return self._pool.submit(self.worker().execute, plan)

    def call(self, method: str, *args: Any) -> list[Any]:
        return [self._pool.submit(self.worker().call, method, *args).result()]

    def worker(self) -> Worker:
        if self._worker is None:
            raise WorkerError("it does not run", rank=0)
        return self._worker

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            self.close(worker)
            self._pool.shutdown()

    def close(self, worker: Worker) -> None:
        self._pool.submit(worker.close).result()


class TwoThreads(InAThread):
    num_pool_threads = 2


class FourThreads(InAThread):
    num_pool_threads = 4


class CallsAtOnce(InAThread):
    def call(self, method: str, *args: Any) -> list[Any]:
        return [self.worker().call(method, *args)]


class NeverCloses(InAThread):
    def close(self, worker: Worker) -> None:
        return


class LoadsTwice(InAThread):
    def build(self) -> Worker:
        worker = super().build()
        worker.load()
        return worker


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
        worker, self._worker = self._worker, None
        if worker is not None:
            self.close(worker)
            self.kept.append(self._pool)

    kept: ClassVar[list[ThreadPoolExecutor]] = []


class GoesOnAfterShutdown(InAThread):
    def shutdown(self) -> None:
        worker = self._worker
        super().shutdown()
        self._worker, self._pool = worker, ThreadPoolExecutor(1)

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        future.set_result(self.worker().execute(plan))
        return future


class ClosesTwice(InAThread):
    def shutdown(self) -> None:
        self.close(self.worker())
        self._worker = None
        self._pool.shutdown()


class SaysAnotherRank(InAThread):
    def build(self) -> Worker:
        worker = self.spec.create(Placement(1, 2, "cpu"))
        worker.load()
        return worker


LIFE = "test_a_worker_is_created_loaded_and_closed_once"
THREADS = "test_workers_have_the_threads_that_the_spec_names"
FAULTS = [
    Fault("runs plans in a pool of 2 threads", TwoThreads, "test_results_come_in_the_order_of_plans"),
    Fault("runs plans in a pool of 4 threads", FourThreads, "test_results_come_in_the_order_of_plans"),
    Fault("calls a worker beside its step", CallsAtOnce, "test_a_call_meets_no_step"),
    Fault("never closes its worker", NeverCloses, LIFE),
    Fault("loads twice", LoadsTwice, LIFE),
    Fault("answers sleep and wake_up by itself", SleepsAlone, LIFE),
    Fault("ignores num_threads", IgnoresThreads, THREADS),
    Fault("has two threads whatever is said", OwnThreads, "test_ranks_reduce_together"),
    Fault("hides an error of a step", HidesErrors, "test_an_error_in_a_step_reaches_the_caller"),
    Fault("changes the type of an error", ChangesErrors, "test_start_raises_what_the_last_rank_raised"),
    Fault("leaves a thread behind", LeavesItsThread, "test_calls_answer_in_rank_order"),
    Fault("goes on after its shutdown", GoesOnAfterShutdown, "test_shutdown_is_idempotent_and_final"),
    Fault("cannot be shut down twice", ClosesTwice, "test_shutdown_is_idempotent_and_final"),
    Fault("tells its worker another rank", SaysAnotherRank, "test_calls_answer_in_rank_order"),
]


@pytest.fixture(autouse=True)
def _threads_stay() -> Any:
    """What faulty executors leave behind ends with the test."""
    yield
    while LeavesItsThread.kept:
        LeavesItsThread.kept.pop().shutdown()


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_finds_an_executor_that(fault: Fault) -> None:
    check_fault(fault, ExecutorSuite, executor_class=fault.plugin)


class TestInAThread(ExecutorSuite):
    executor_class = InAThread
