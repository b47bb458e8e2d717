"""Worker processes as processes: how they are started, looked at and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe

from dovetail.executors._activity import is_stopped
from dovetail.executors._worker_process import BOOTSTRAP

STOP_S = 5.0
"""How long to wait for processes, per stage of their end: asked, terminated, killed."""


class WorkerProcesses:
    """Child processes in rank order, each with our end of a pipe."""

    def __init__(self) -> None:
        self.pipes: list[Connection] = []
        self._children: list[subprocess.Popen[bytes]] = []

    def spawn(self, env: Mapping[str, str]) -> None:
        """Starts the next rank. A fresh interpreter: it waits for `sys.path` and a `Launch` on its pipe."""
        ours, theirs = Pipe()
        self.pipes.append(ours)
        with theirs:
            command = [sys.executable, "-P", "-c", BOOTSTRAP, str(theirs.fileno())]
            self._children.append(subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()]))

    def pid(self, rank: int) -> int:
        """Process id of a rank."""
        return self._children[rank].pid

    def is_dead(self, rank: int) -> bool:
        """Whether the process has ended."""
        return self._children[rank].poll() is not None

    def any_stopped(self) -> bool:
        """Whether one is halted, and cannot do what it is asked to."""
        return any(is_stopped(child.pid) for child in self._children if child.poll() is None)

    def how_it_ended(self, rank: int) -> str:
        """What became of a process whose pipe has ended, as the end of a sentence."""
        try:
            code = self._children[rank].wait(STOP_S)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        if code >= 0:
            return f"exited with code {code}"
        hint = " (the kernel does so when memory runs out: see dmesg)" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"

    def wait(self, seconds: float = STOP_S) -> None:
        """Waits for all, at most so long."""
        deadline = time.monotonic() + seconds
        for child in self._children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue

    def terminate(self) -> None:
        """SIGTERM to those that live, and waits."""
        for child in self._children:
            child.terminate()
        self.wait()

    def kill(self) -> None:
        """SIGKILL to those that live, and waits."""
        for child in self._children:
            child.kill()
        self.wait()

    def shut_pipes(self, how: int) -> None:
        """Ends the talk, in the sense of `socket.shutdown`. Never blocks, and ends a send that does.

        SHUT_WR asks the workers to stop once they have done what was sent before.
        """
        for pipe in self.pipes:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as end:
                end.shutdown(how)

    def close_pipes(self) -> None:
        """Closes our ends."""
        for pipe in self.pipes:
            pipe.close()
