"""The `multiproc` executor: one process per rank on this machine, tensor parallel over torch.distributed."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import tempfile
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from dovetail.contracts.errors import WorkerError
from dovetail.contracts.executor import (
    Executor,
    ExecutorCapabilities,
    ExecutorNeed,
    Placement,
    ThreadCount,
    WorkerLayout,
    WorkerSpec,
)
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.contracts.step import StepPlan, StepResult
from dovetail.executors._cores import CoreList, reasons_against, share_of
from dovetail.executors._threads import worker_threads
from dovetail.executors._worker_group import Timeouts, WorkerGroup


class MultiprocOptions(PluginOptions):
    """Options of `multiproc`."""

    start_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds in which every worker must have loaded its weights; a call such as sleep or wake_up has as many."""
    step_timeout_s: float | None = Field(default=600.0, gt=0)
    """Seconds in which a step must be done, counted from the end of the step before it. After that all workers are
    stopped, and the error names the one that hangs. None: a step may take any time."""
    threads: int | None = Field(default=None, ge=1)
    """Threads of torch in each worker; before the engine's own setting where both are given. None: the engine's,
    else one per core of the worker's share of `cores`, else what OMP_NUM_THREADS says, else the usable physical cores
    divided by the number of workers."""
    cores: CoreList | None = None
    """Cores that the workers are bound to, as in "0-3,8", each to an equal share of neighbours; Linux only. None: they
    may run anywhere, and the system decides."""


class MultiprocExecutor(Executor):
    """Starts a fresh Python process per rank and talks to it over a pipe.

    `execute` returns at once, and several plans may be under way. An error in `start` or in a call is raised as
    the worker raised it, with its traceback as a note; a call's error leaves the workers running. An error in a
    step may leave the ranks out of step with each other: it ends the executor, and the futures fail with
    `WorkerError`, whose cause is the worker's own error; so does a worker that hangs. Workers are children of the
    process that calls `start` and end with it, however it ends.
    """

    contract: ClassVar[tuple[int, int]] = (1, 0)
    Options: ClassVar[type[PluginOptions]] = MultiprocOptions
    is_interruptible: ClassVar[bool] = True
    preference: ClassVar[int] = 0
    capabilities = ExecutorCapabilities(
        device_types=frozenset({"cpu", "cuda"}), tensor_parallel=None, enforce_eager=True
    )

    def __init__(self, options: MultiprocOptions, spec: WorkerSpec, need: ExecutorNeed):
        super().__init__(options, spec, need)
        self._timeouts = Timeouts(options.start_timeout_s, options.step_timeout_s)
        self._threads = options.threads if options.threads is not None else spec.num_threads
        size = need.tensor_parallel
        self._cores = [share_of(options.cores, rank, size) for rank in range(size)]
        self._group: WorkerGroup | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    @classmethod
    def check(cls, need: ExecutorNeed, options: Any, environment: Environment) -> list[str]:
        """As many GPUs as there are ranks, and cores for each."""
        reasons = []
        if os.name != "posix":
            reasons.append("multiproc needs Linux or macOS")
        if need.device_type == "cuda" and len(environment.devices) < need.tensor_parallel:
            reasons.append(
                f"tensor_parallel={need.tensor_parallel} needs as many GPUs, and torch sees {len(environment.devices)}"
            )
        return reasons + reasons_against(options.cores, need.tensor_parallel)

    @classmethod
    def threads(cls, need: ExecutorNeed, options: Any, environment: Environment) -> ThreadCount:
        """As for the workers' processes."""
        cores = share_of(options.cores, 0, need.tensor_parallel)
        num_cores = None if cores is None else len(cores)
        return worker_threads(options.threads, need.tensor_parallel, num_cores, environment)

    def start(self) -> None:
        """Starts the processes and waits until all have loaded. Raises the first error of a worker, or `WorkerError`
        where one died or hung."""
        if self._group is not None:
            raise RuntimeError("start() was called twice")
        spec = pickle.dumps(self.spec, pickle.HIGHEST_PROTOCOL)
        scratch = tempfile.mkdtemp(prefix="dovetail-")  # private to this user, so is the rendezvous in it
        self._group = group = WorkerGroup(self._placements(scratch), scratch, self._cores, self._timeouts)
        self._finalizer = weakref.finalize(self, _end, group, scratch)
        try:
            group.start(spec, self._environment()).result()
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
        """Waits for every rank's answer."""
        return self._started().call(method, args).result()

    def shutdown(self) -> None:
        """Asks the workers to stop; after some seconds makes them."""
        if self._finalizer is not None:
            self._finalizer()

    def _started(self) -> WorkerGroup:
        if self._group is None:
            raise WorkerError("this executor is not running: call start() first")
        return self._group

    def _kill(self) -> None:
        if self._group is not None:
            self._group.stop(politely=False)
        self.shutdown()

    def _placements(self, scratch: str) -> list[Placement]:
        size = self.need.tensor_parallel
        # A file cannot be taken by another process between its choice and its use, as a port can.
        init_method = (Path(scratch) / "rendezvous").as_uri() if size > 1 else None
        is_cuda = self.need.device_type == "cuda"
        devices = [f"cuda:{rank}" if is_cuda else "cpu" for rank in range(size)]
        return WorkerLayout(tensor_parallel=size).placements(devices, init_method=init_method)

    def _environment(self) -> dict[str, str]:
        num_cores = None if self._cores[0] is None else len(self._cores[0])
        threads = worker_threads(self._threads, self.need.tensor_parallel, num_cores).count
        env = dict(os.environ, OMP_NUM_THREADS=str(threads))
        if sys.platform == "linux":
            # All ranks are on this machine. By default gloo resolves the host's name, which may fail or lead outside.
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return env


def _end(group: WorkerGroup, scratch: str) -> None:
    if group.is_ours:
        group.stop()
        shutil.rmtree(scratch, ignore_errors=True)
