"""One worker's process, as its driver sees it."""

from __future__ import annotations

import signal
import subprocess
from abc import ABC, abstractmethod
from multiprocessing.connection import Connection

import psutil


class WorkerProcess(ABC):
    """A process that was started for one worker, here or elsewhere. Its methods are called by several threads."""

    @property
    @abstractmethod
    def local_pid(self) -> int | None:
        """Process id of the worker itself where it runs on this machine and sees its folders: it gets this process's
        import path then, and one that hangs is asked where it is. None elsewhere."""

    @property
    def label(self) -> str:
        """For messages, to be read in brackets behind the rank."""
        return f"pid {self.local_pid}" if self.local_pid is not None else "on another machine"

    @abstractmethod
    def connect(self, timeout_s: float) -> Connection:
        """The driver's end of a connection whose other end the process gives to `serve`. Called once, when the
        processes of all ranks were started. What is read from a connection is unpickled: it must come from the worker
        and from nobody else (a socket pair, a socket in a private folder, or one with an authentication key). Raises
        `OSError` (`TimeoutError` is one) where the process cannot be reached."""

    @abstractmethod
    def exit_code(self) -> int | None:
        """None while it runs; then its exit code, or minus the number of the signal that ended it. Does not block."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Returns when it has ended, after so many seconds at most."""

    @abstractmethod
    def terminate(self) -> None:
        """Asks it to end, as SIGTERM does. Does not block; nothing for one that has ended."""

    @abstractmethod
    def kill(self) -> None:
        """Ends it, whatever it does, as SIGKILL does. Does not block; nothing for one that has ended."""

    def close(self) -> None:
        """Frees what is held on this side, besides the connection that `connect` gave away; called once nothing more is
        sent, and also where `connect` was never called. Does not block. Here nothing."""
        return None

    def is_stopped(self) -> bool:
        """Whether it is halted (SIGSTOP, a debugger), so that it does nothing of what it is asked; False where nobody
        can tell."""
        if self.local_pid is None:
            return False
        try:
            return psutil.Process(self.local_pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except psutil.NoSuchProcess:
            return False

    def ask_for_stack(self) -> None:
        """Has a worker on this machine write its stack into its scratch file."""
        if self.local_pid is not None:
            try:
                psutil.Process(self.local_pid).send_signal(signal.SIGUSR1)
            except psutil.NoSuchProcess:
                return


class ChildProcess(WorkerProcess):
    """A child of this process: the worker, or what stands for it here and ends with it, such as `ssh` or `srun` (whose
    `local_pid` is None then). How it is connected to is left to subclasses."""

    def __init__(self, child: subprocess.Popen[bytes]):
        self._child = child

    @property
    def local_pid(self) -> int | None:
        """The child's."""
        return self._child.pid

    def exit_code(self) -> int | None:
        """As `subprocess.Popen.poll`."""
        return self._child.poll()

    def wait(self, seconds: float) -> None:
        """As `subprocess.Popen.wait`, without an error."""
        try:
            self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return

    def terminate(self) -> None:
        """SIGTERM."""
        self._child.terminate()

    def kill(self) -> None:
        """SIGKILL."""
        self._child.kill()
