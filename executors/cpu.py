"""The `cpu` executor: one worker in this process."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, ClassVar

from pydantic import Field

from dovetail.contracts.errors import WorkerError
from dovetail.contracts.executor import Executor, ExecutorNeed, Placement, Worker, WorkerSpec
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.contracts.step import StepPlan, StepResult
from dovetail.executors._threads import TorchThreads, worker_threads


class CPUOptions(PluginOptions):
    """Options of `cpu`."""

    threads: int | None = Field(default=None, ge=1)
    """Threads of torch; before the engine's own setting where both are given. None: the engine's, else what
    OMP_NUM_THREADS says, else the physical cores that this process may use."""


class CPUExecutor(Executor):
    """Runs steps in the calling thread, on one worker.

    What the worker raises in a step or a call is raised as it is, with its own traceback (from the future, for a
    step), and does not end the executor.
    """

    contract: ClassVar[tuple[int, int]] = (1, 0)
    Options: ClassVar[type[PluginOptions]] = CPUOptions
    preference: ClassVar[int] = 10

    def __init__(self, options: CPUOptions, spec: WorkerSpec, need: ExecutorNeed):
        super().__init__(options, spec, need)
        self._threads = worker_threads(options.threads if options.threads is not None else spec.num_threads)
        self._worker: Worker | None = None
        self._torch_threads = TorchThreads()

    @classmethod
    def check(cls, need: ExecutorNeed, options: Any, environment: Environment) -> list[str]:
        """One worker on the CPU."""
        reasons = []
        if need.device_type != "cpu":
            reasons.append(f"cpu runs on the CPU only, and the device is {need.device_type}")
        if need.tensor_parallel > 1:
            reasons.append(f"cpu has one worker and cannot run tensor_parallel={need.tensor_parallel}: use multiproc")
        if need.pipeline_parallel > 1:
            reasons.append(f"cpu has one worker and cannot run pipeline_parallel={need.pipeline_parallel}")
        return reasons

    def start(self) -> None:
        """Builds and loads the worker here, and sets torch's threads for this process until `shutdown`."""
        if self._worker is not None:
            raise RuntimeError("start() was called twice")
        self._torch_threads.set(self._threads)
        try:
            self._worker = self.spec.create(Placement(rank=0, world_size=1, device="cpu"))
            self._worker.load()
        except BaseException:
            self.shutdown()
            raise

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """Runs the step before it returns; the future is done."""
        worker = self._running()
        future: Future[StepResult] = Future()
        try:
            future.set_result(worker.execute(plan))
        except Exception as error:
            future.set_exception(error)
        return future

    def call(self, method: str, *args: Any) -> list[Any]:
        """One answer."""
        return [self._running().call(method, *args)]

    def shutdown(self) -> None:
        """Closes the worker and gives torch its former number of threads."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
        self._torch_threads.restore()

    def _running(self) -> Worker:
        if self._worker is None:
            raise WorkerError("this executor is not running: it was not started, or was shut down", rank=0)
        return self._worker
