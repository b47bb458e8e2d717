"""The `multiproc` executor: one process per rank on this machine, tensor and pipeline parallel over
torch.distributed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import field_validator

from dovetail.contracts.device import Runtime
from dovetail.contracts.executor import (
    ExecutorCapabilities,
    ExecutorNeed,
    ExpectedWorkers,
    Placement,
    ThreadCount,
    WorkerLayout,
    WorkerSpec,
)
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.executors._cores import CoreList, reasons_against, share_of
from dovetail.executors._graphs import GraphSizes, against_sizes, wanted_sizes
from dovetail.executors._threads import worker_threads
from dovetail.executors.processes import ChildProcess, ProcessExecutor, ProcessOptions

_BOOTSTRAP = """\
import sys
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
sys.path[:] = pipe.recv()
from dovetail.executors.processes.worker import serve_launch
serve_launch(pipe)
"""
"""The command line of a worker. It does not import the driver's `__main__`: engines can be made in scripts without a
`__main__` guard, in notebooks and from standard input. dovetail may be importable only with the driver's `sys.path`,
hence the script first receives it."""


class MultiprocOptions(ProcessOptions):
    """Options of `multiproc`. Without `threads` and `executor.threads`, a worker has one thread per core of its share
    of `cores`, else OMP_NUM_THREADS, else the usable physical cores divided by the number of workers."""

    cores: CoreList | None = None
    """Cores that the workers are bound to, as in "0-3,8", each to an equal share of neighbouring cores; Linux only.
    None: the system decides."""
    device: Literal["auto", "null"] = "auto"
    """"null": on CPUs, with the host path of GPUs, captured graphs included, for tests; collectives are gloo's."""
    cuda_graphs: GraphSizes = "auto"
    """On GPUs and on the null device: batch sizes for which decode and verify steps are captured, on every rank alike;
    "off", or executor.enforce_eager: none."""

    @field_validator("device", mode="before")
    @classmethod
    def _null_is_a_name(cls, value: Any) -> Any:
        return "null" if value is None else value  # what YAML makes of null


class PipedProcess(ChildProcess):
    """A fresh Python interpreter, and our end of a socket pair that it inherits."""

    def __init__(self, environment: Mapping[str, str]):
        self._pipe, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-P", "-c", _BOOTSTRAP, str(theirs.fileno())]
            super().__init__(subprocess.Popen(command, env=os.environ | environment, pass_fds=[theirs.fileno()]))

    def connect(self, timeout_s: float) -> Connection:
        """Returns the connection at once."""
        return self._pipe

    def close(self) -> None:
        """Closes the driver's end of the socket pair."""
        self._pipe.close()


class MultiprocExecutor(ProcessExecutor):
    """Starts a fresh Python process per rank and talks to it over a pipe; see `ProcessExecutor`."""

    contract: ClassVar[tuple[int, int]] = (1, 8)
    Options: ClassVar[type[PluginOptions]] = MultiprocOptions
    preference: ClassVar[int] = 0
    capabilities = ExecutorCapabilities(
        device_types=frozenset({"cpu", "cuda"}), tensor_parallel=None, pipeline_parallel=None, enforce_eager=True
    )
    options: MultiprocOptions

    def __init__(self, options: MultiprocOptions, spec: WorkerSpec, need: ExecutorNeed):
        super().__init__(options, spec, need)
        num_ranks = need.num_ranks
        self._cores = [share_of(options.cores, rank, num_ranks) for rank in range(num_ranks)]

    @classmethod
    def check(cls, need: ExecutorNeed, options: Any, environment: Environment) -> list[str]:
        """Refuses fewer GPUs than ranks, and fewer cores than workers."""
        reasons = []
        if os.name != "posix":
            reasons.append("multiproc needs Linux or macOS")
        if need.device_type == "cuda" and len(environment.devices) < need.num_ranks:
            asked = f"tensor_parallel={need.tensor_parallel}"
            if need.pipeline_parallel > 1:
                asked += f" in each of {need.pipeline_parallel} pipeline stages"
            reasons.append(f"{asked} needs {need.num_ranks} GPUs, and torch sees {len(environment.devices)}")
        if options.device == "null" and need.device_type != "cpu":
            reasons.append(f"executor.device null runs on the CPU, and the device is {need.device_type}")
        sizes = wanted_sizes(need, options.cuda_graphs)
        if options.device == "null" or need.device_type == "cuda":
            reasons += against_sizes(need, sizes)
        elif isinstance(sizes, tuple):
            reasons.append(
                f"executor.cuda_graphs {list(sizes)} are for GPUs, and the device is {need.device_type}: leave them out"
            )
        return reasons + reasons_against(options.cores, need.num_ranks)

    @classmethod
    def threads(cls, need: ExecutorNeed, options: Any, environment: Environment) -> ThreadCount:
        """The threads of each worker process."""
        cores = share_of(options.cores, 0, need.num_ranks)
        num_cores = None if cores is None else len(cores)
        return worker_threads(options.threads, need.num_ranks, num_cores, environment)

    @classmethod
    def expected_workers(cls, need: ExecutorNeed, options: Any) -> ExpectedWorkers:
        """A process per rank on this machine."""
        layout = WorkerLayout(tensor_parallel=need.tensor_parallel, num_stages=need.pipeline_parallel)
        is_cuda = need.device_type == "cuda"
        devices = tuple(f"cuda:{rank}" if is_cuda else need.device_type for rank in range(layout.num_ranks))
        return ExpectedWorkers(layout=layout, devices=devices, nodes=("this machine",), transport="socket pair")

    def placements(self, scratch: Path) -> list[Placement]:
        """All on this machine; on GPUs and on the null device with captured graphs."""
        runtime = self._runtime()
        return [replace(placement, runtime=runtime) for placement in super().placements(scratch)]

    def launch(self, placement: Placement, environment: Mapping[str, str], scratch: Path) -> PipedProcess:
        """Starts a child process for the rank."""
        return PipedProcess(environment)

    def _runtime(self) -> Runtime | None:
        graphs = wanted_sizes(self.need, self.options.cuda_graphs)
        if self.options.device == "null":
            from dovetail.executors.gpu.host import at_once

            return Runtime(at_once, graphs)
        if self.need.device_type != "cuda":
            return None
        from dovetail.executors.gpu.cuda import CudaDevice

        return Runtime(CudaDevice, graphs)

    def cores(self, rank: int) -> tuple[int, ...] | None:
        """The rank's share of the option `cores`."""
        return self._cores[rank]

    def num_threads(self) -> int:
        """The option `threads`, `executor.threads`, or the worker's share of the machine."""
        num_cores = None if self._cores[0] is None else len(self._cores[0])
        return worker_threads(super().num_threads(), self.need.num_ranks, num_cores).count

    def environment_variables(self) -> dict[str, str]:
        """Variables for ranks that are all on this machine."""
        environment = super().environment_variables()
        if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
            # By default gloo resolves the host's name, which may fail or lead outside.
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        return environment
