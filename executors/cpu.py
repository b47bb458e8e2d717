"""The `cpu` executor: one worker in this process."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, ClassVar

from pydantic import Field

from dovetail.contracts.errors import WorkerError
from dovetail.contracts.executor import (
    Executor,
    ExecutorCapabilities,
    ExecutorNeed,
    ExpectedWorkers,
    Placement,
    RankStatus,
    ThreadCount,
    Worker,
    WorkerLayout,
    WorkerSpec,
)
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.contracts.step import StepPlan, StepResult
from dovetail.executors._cores import BoundThread, CoreList, reasons_against, share_of
from dovetail.executors._own_status import own_status
from dovetail.executors._threads import TorchThreads, tell_thread, worker_threads


class CPUOptions(PluginOptions):
    """Options of `cpu`."""

    threads: int | None = Field(default=None, ge=1)
    """Threads of torch; takes precedence over `executor.threads`. None: that setting, else one per core of `cores`,
    else OMP_NUM_THREADS, else the physical cores that this process may use."""
    cores: CoreList | None = None
    """Cores for the thread that runs steps and for its parallel loops, as in "0-3,8"; Linux only. Threads of a server
    and a tokenizer are not bound. None: the system decides."""


class CPUExecutor(Executor):
    """Runs steps in the calling thread, on one worker.

    An error of the worker in a step or a call is raised unchanged, with its traceback (by the future, for a step), and
    does not end the executor.
    """

    contract: ClassVar[tuple[int, int]] = (1, 8)
    Options: ClassVar[type[PluginOptions]] = CPUOptions
    preference: ClassVar[int] = 10
    capabilities = ExecutorCapabilities(device_types=frozenset({"cpu"}), enforce_eager=True)

    def __init__(self, options: CPUOptions, spec: WorkerSpec, need: ExecutorNeed):
        super().__init__(options, spec, need)
        cores = share_of(options.cores, 0, 1)
        threads = options.threads if options.threads is not None else spec.num_threads
        self._threads = worker_threads(threads, num_cores=None if cores is None else len(cores)).count
        self._worker: Worker | None = None
        self._thread: int | None = None
        """Native id of the thread that ran the last step."""
        self._torch_threads = TorchThreads()
        self._bound = None if cores is None else BoundThread(cores)

    @classmethod
    def check(cls, need: ExecutorNeed, options: Any, environment: Environment) -> list[str]:
        """Refuses cores that this process may not use."""
        return reasons_against(options.cores)

    @classmethod
    def threads(cls, need: ExecutorNeed, options: Any, environment: Environment) -> ThreadCount:
        """As in `__init__`."""
        cores = share_of(options.cores, 0, 1)
        return worker_threads(options.threads, 1, None if cores is None else len(cores), environment)

    @classmethod
    def expected_workers(cls, need: ExecutorNeed, options: Any) -> ExpectedWorkers:
        """One worker, in the engine's process."""
        return ExpectedWorkers(layout=WorkerLayout(), devices=("cpu",), nodes=("this machine",), transport="")

    def start(self) -> None:
        """Builds and loads the worker in this process, and sets torch's threads until `shutdown`."""
        if self._worker is not None:
            raise RuntimeError("start() was called twice")
        # Threads of parallel loops stay where they are started, and so do those that a bound thread starts: a server's.
        self._bind()
        try:
            self._torch_threads.set(self._threads)
            self._worker = self.spec.create(Placement(device="cpu"))
            self._worker.load()
        except BaseException:
            self.shutdown()
            raise
        self._unbind()

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """Runs the step; the returned future is done."""
        worker = self._running()
        thread = threading.get_native_id()
        if thread != self._thread:
            self._thread = thread
            self._bind()
            tell_thread()
        future: Future[StepResult] = Future()
        try:
            future.set_result(worker.execute(plan))
        except Exception as error:
            future.set_exception(error)
        return future

    def call(self, method: str, *args: Any) -> list[Any]:
        """Returns the worker's answer."""
        return [self._running().call(method, *args)]

    def rank_status(self) -> tuple[RankStatus, ...]:
        """The engine's own process."""
        return () if self._worker is None else (own_status("cpu"),)

    def shutdown(self) -> None:
        """Closes the worker, restores torch's number of threads, and releases a bound thread."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
        self._torch_threads.restore()
        self._unbind()

    def _bind(self) -> None:
        if self._bound is not None:
            self._bound.bind()

    def _unbind(self) -> None:
        if self._bound is not None:
            self._bound.restore()

    def _running(self) -> Worker:
        if self._worker is None:
            raise WorkerError("this executor is not running: it was not started, or was shut down", rank=0)
        return self._worker
