"""One worker, in the calling thread."""

from concurrent.futures import Future
from typing import Any

import torch

from dovetail.contracts.errors import WorkerError
from dovetail.contracts.executor import Executor, ExecutorCapabilities, ExecutorNeed, Placement, Worker, WorkerSpec
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.step import StepPlan, StepResult


class Frozen(Executor):
    contract = (1, 0)
    preference = -100
    capabilities = ExecutorCapabilities(device_types=frozenset({"cpu"}), enforce_eager=True)

    def __init__(self, options: PluginOptions, spec: WorkerSpec, need: ExecutorNeed):
        super().__init__(options, spec, need)
        self._worker: Worker | None = None
        self._threads_before = torch.get_num_threads()

    def start(self) -> None:
        if self.spec.num_threads is not None:
            torch.set_num_threads(self.spec.num_threads)
        worker = self.spec.create(Placement(device="cpu"))
        try:
            worker.load()
        except BaseException:
            worker.close()
            raise
        self._worker = worker

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        worker = self._running()
        future: Future[StepResult] = Future()
        try:
            future.set_result(worker.execute(plan))
        except Exception as error:
            future.set_exception(error)
        return future

    def call(self, method: str, *args: Any) -> list[Any]:
        return [self._running().call(method, *args)]

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
            torch.set_num_threads(self._threads_before)

    def _running(self) -> Worker:
        if self._worker is None:
            raise WorkerError("the executor was not started, or was shut down", rank=0)
        return self._worker
