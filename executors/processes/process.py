"""The driver's handle on one worker's process."""

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
        """Process id of the worker itself, if it runs on this machine and sees its folders: it then gets this process's
        import path, and writes its stack when it hangs. None elsewhere."""

    @property
    def label(self) -> str:
        """Text for messages, in brackets after the rank."""
        return f"pid {self.local_pid}" if self.local_pid is not None else "on another machine"

    @property
    def node(self) -> str:
        """The worker's machine, in words."""
        return "this machine" if self.local_pid is not None else "another machine"

    @abstractmethod
    def connect(self, timeout_s: float) -> Connection:
        """Returns the driver's end of a connection whose other end the process gives to `serve`. Called once, when the
        processes of all ranks were started. The driver unpickles what it reads: make sure that only the worker can
        write (a socket pair, a socket in a private folder, or one with an authentication key). Raises `OSError`
        (`TimeoutError` is one) where the process cannot be reached."""

    @abstractmethod
    def exit_code(self) -> int | None:
        """Returns None while the process runs; then its exit code, or minus the number of the signal that ended it.
        Does not block."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Returns when the process has ended, at most after `seconds`."""

    @abstractmethod
    def terminate(self) -> None:
        """Asks the process to end, as SIGTERM does. Does not block; ignored if it has ended."""

    @abstractmethod
    def kill(self) -> None:
        """Ends the process by force, as SIGKILL does. Does not block; ignored if it has ended."""

    def close(self) -> None:
        """Frees resources of the driver's side, except the connection that `connect` returned. Called once no more
        messages are sent, and also where `connect` was never called. Does not block. The default does nothing."""
        return None

    def lost(self) -> str | None:
        """Why the process counts as ended although its exit code is not known, as the end of a sentence: its machine is
        gone. None where it does not. The default returns None. Does not block."""
        return None

    def is_stopped(self) -> bool:
        """Whether the process is halted (SIGSTOP, a debugger), so that it does not answer; False where this is not
        known."""
        if self.local_pid is None:
            return False
        try:
            return psutil.Process(self.local_pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except psutil.NoSuchProcess:
            return False

    def ask_for_stack(self) -> None:
        """Makes a worker on this machine write its stack into its scratch file."""
        if self.local_pid is not None:
            try:
                psutil.Process(self.local_pid).send_signal(signal.SIGUSR1)
            except psutil.NoSuchProcess:
                return


class ChildProcess(WorkerProcess):
    """A child of this process: the worker, or a local process that represents it and ends with it, such as `ssh` or
    `srun` (whose `local_pid` is None). Subclasses implement `connect`."""

    def __init__(self, child: subprocess.Popen[bytes]):
        self._child = child

    @property
    def local_pid(self) -> int | None:
        """Process id of the child."""
        return self._child.pid

    def exit_code(self) -> int | None:
        return self._child.poll()

    def wait(self, seconds: float) -> None:
        """As `subprocess.Popen.wait`, without an error."""
        try:
            self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self._child.terminate()

    def kill(self) -> None:
        """Sends SIGKILL."""
        self._child.kill()
