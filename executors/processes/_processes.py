"""The worker processes of one executor and the pipes to them, in rank order."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from multiprocessing.connection import Connection

from dovetail.contracts.errors import WorkerError
from dovetail.contracts.executor import Placement
from dovetail.executors.processes.process import WorkerProcess
from dovetail.executors.processes.worker import STOP_S


class WorkerProcesses:
    """All worker processes, and, after `connect`, the driver's end of a connection to each."""

    def __init__(self) -> None:
        self.processes: list[WorkerProcess] = []
        self.pipes: list[Connection] = []
        self._places: list[str] = []

    def add(self, process: WorkerProcess, placement: Placement) -> None:
        """Adds the process of the next rank."""
        self.processes.append(process)
        place = f", stage {placement.stage}, tensor rank {placement.tensor_rank}" if placement.num_stages > 1 else ""
        self._places.append(place)

    @property
    def labels(self) -> list[str]:
        """`WorkerProcess.label` of each, as it is known now, with its place where there are several pipeline stages."""
        return [process.label + place for process, place in zip(self.processes, self._places, strict=True)]

    def connect(self, timeout_s: float) -> None:
        """Connects to all processes. Raises `WorkerError` for the first that cannot be reached."""
        deadline = time.monotonic() + timeout_s
        for rank, process in enumerate(self.processes):
            try:
                self.pipes.append(process.connect(max(0.0, deadline - time.monotonic())))
            except OSError as error:
                ended = "" if process.exit_code() is None else f"; it {self.how_it_ended(rank)}"
                raise WorkerError(f"{self.name(rank)} cannot be reached: {error!r}{ended}", rank=rank) from error

    def name(self, rank: int) -> str:
        """The worker's name in messages."""
        return f"worker rank {rank} ({self.labels[rank]})"

    def is_dead(self, rank: int) -> bool:
        """Whether the process has ended."""
        process = self.processes[rank]
        return process.exit_code() is not None or process.lost() is not None

    def any_stopped(self) -> bool:
        """Whether a process is halted (SIGSTOP), so that it does not answer."""
        return any(process.is_stopped() for process in self.processes if process.exit_code() is None)

    def how_it_ended(self, rank: int) -> str:
        """How a process ended whose connection has closed, as the end of a sentence."""
        self.processes[rank].wait(STOP_S)
        code = self.processes[rank].exit_code()
        if code is None:
            return self.processes[rank].lost() or "closed its connection"
        if code >= 0:
            return f"exited with code {code}"
        hint = " (the kernel does so when memory runs out: see dmesg)" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"

    def wait(self, seconds: float = STOP_S) -> None:
        """Waits until all processes have ended, at most `seconds`."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.wait(max(0.0, deadline - time.monotonic()))

    def terminate(self) -> None:
        """Terminates the living processes, and waits."""
        for process in self.processes:
            process.terminate()
        self.wait()

    def kill(self) -> None:
        """Kills the living processes, and waits."""
        for process in self.processes:
            process.kill()
        self.wait()

    def shut_pipes(self, how: int) -> None:
        """Shuts down the connections as `socket.shutdown` does. Never blocks, and ends a send that blocks.

        SHUT_WR asks the workers to stop once they have done what was sent before.
        """
        for pipe in self.pipes:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as end:
                end.shutdown(how)

    def close(self) -> None:
        """Closes the driver's ends of the connections."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.close()
