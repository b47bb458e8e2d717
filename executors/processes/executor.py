"""The base of executors whose workers are separate processes."""

from __future__ import annotations

import pickle
import shutil
import tempfile
import weakref
from abc import abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from dovetail.contracts.errors import WorkerError
from dovetail.contracts.executor import Executor, ExecutorNeed, Placement, RankStatus, WorkerLayout, WorkerSpec
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.step import StepPlan, StepResult
from dovetail.executors.processes._operations import Timeouts
from dovetail.executors.processes._processes import WorkerProcesses
from dovetail.executors.processes._supervisor import WorkerSupervisor
from dovetail.executors.processes.process import WorkerProcess


class ProcessOptions(PluginOptions):
    """Options of every executor of processes; a subclass may add options."""

    start_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds in which every worker must have loaded its weights; also the timeout of a call such as sleep or
    wake_up."""
    step_timeout_s: float | None = Field(default=600.0, gt=0)
    """Seconds in which a step must be done, counted from the end of the step before it. After that all workers are
    stopped, and the error names the one that hangs. None: a step may take any time."""
    threads: int | None = Field(default=None, ge=1)
    """Threads of torch in each worker; takes precedence over `executor.threads`. None: that setting, else the executor
    chooses."""


class ProcessExecutor(Executor):
    """Starts a process per rank and talks to it over a connection. A subclass implements how a process is started
    (`launch`), and where workers are (`placements`) unless all are on this machine.

    `execute` returns at once, and several plans may be in flight. An error in `start` or in a call is raised as the
    worker raised it, with its traceback as a note; a call's error leaves the workers running. After an error in a step
    the ranks may differ in what they have done, so it ends the executor: the futures fail with `WorkerError`, whose
    cause is the worker's error. A worker that dies or hangs ends it too. Workers end with the process that calls
    `start`, however that ends.
    """

    Options: ClassVar[type[PluginOptions]] = ProcessOptions
    is_interruptible: ClassVar[bool] = True
    options: ProcessOptions

    def __init__(self, options: ProcessOptions, spec: WorkerSpec, need: ExecutorNeed):
        super().__init__(options, spec, need)
        self._timeouts = Timeouts(options.start_timeout_s, options.step_timeout_s)
        self._supervisor: WorkerSupervisor | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    @abstractmethod
    def launch(self, placement: Placement, environment: Mapping[str, str], scratch: Path) -> WorkerProcess:
        """Starts the process of one rank, which calls `serve` once it is connected; does not wait for it.

        `start` calls it for rank 0, 1, ... in turn. `environment`: variables to add to the process's own. `scratch`: a
        directory on this machine, the same for all ranks, empty at first, private to this user, and removed at the end.
        Where this raises, `start` ends the processes that were started and raises the same error.
        """

    def placements(self, scratch: Path) -> list[Placement]:
        """Returns the placement of each rank, in rank order. By default all are on this machine, on its CPU or on one
        GPU each, and their rendezvous is a file in `scratch`."""
        layout = WorkerLayout(tensor_parallel=self.need.tensor_parallel, num_stages=self.need.pipeline_parallel)
        is_cuda = self.need.device_type == "cuda"
        devices = [f"cuda:{rank}" if is_cuda else self.need.device_type for rank in range(layout.num_ranks)]
        # A file cannot be taken by another process between its choice and its use, as a port can.
        init_method = (scratch / "rendezvous").as_uri() if layout.num_ranks > 1 else None
        return layout.placements(devices, init_method=init_method)

    def num_threads(self) -> int | None:
        """Returns the threads of each worker; None: as its environment says."""
        return self.options.threads if self.options.threads is not None else self.spec.num_threads

    def cores(self, rank: int) -> tuple[int, ...] | None:
        """Returns the cores that the worker's threads are bound to; None: any."""
        return None

    def environment_variables(self) -> dict[str, str]:
        """Returns environment variables that every worker needs."""
        threads = self.num_threads()
        return {} if threads is None else {"OMP_NUM_THREADS": str(threads)}

    def start(self) -> None:
        """Starts the processes and waits until all have loaded. Raises the first error of a worker, or `WorkerError`
        where one died, hung or cannot be reached."""
        if self._supervisor is not None:
            raise RuntimeError("start() was called twice")
        spec = pickle.dumps(self.spec, pickle.HIGHEST_PROTOCOL)
        scratch = tempfile.mkdtemp(prefix="dovetail-")  # private to this user
        workers = WorkerProcesses()
        try:
            placements = self.placements(Path(scratch))
            environment = self.environment_variables()
            for placement in placements:
                workers.add(self.launch(placement, environment, Path(scratch)), placement)
            workers.connect(self.options.start_timeout_s)
        except BaseException:
            workers.kill()
            workers.close()
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        self._supervisor = supervisor = WorkerSupervisor(placements, workers, scratch, self._timeouts)
        self._finalizer = weakref.finalize(self, _end, supervisor, scratch)
        try:
            supervisor.start(spec, [self.cores(rank) for rank in range(len(placements))]).result()
        except WorkerError as error:
            self._kill()
            raise (error.__cause__ or error) from None
        except BaseException:
            self._kill()
            raise

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """Sends the plan, pickled once, to every worker."""
        return self._started().execute(plan)

    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls an operation on every rank and waits for all answers."""
        return self._started().call(method, args).result()

    def rank_status(self) -> tuple[RankStatus, ...]:
        """What the processes reported last, which they do once per second; empty before `start`."""
        return () if self._supervisor is None else self._supervisor.status()

    def shutdown(self) -> None:
        """Asks the workers to stop; after some seconds kills them."""
        if self._finalizer is not None:
            self._finalizer()

    def _started(self) -> WorkerSupervisor:
        if self._supervisor is None:
            raise WorkerError("this executor is not running: call start() first")
        return self._supervisor

    def _kill(self) -> None:
        if self._supervisor is not None:
            self._supervisor.stop(politely=False)
        self.shutdown()


def _end(supervisor: WorkerSupervisor, scratch: str) -> None:
    if supervisor.is_ours:
        supervisor.stop()
        shutil.rmtree(scratch, ignore_errors=True)
