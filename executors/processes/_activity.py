"""Records what a worker process does, for the driver to read when it gets no answer."""

from __future__ import annotations

import faulthandler
import mmap
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.executors.processes.process import WorkerProcess

_SIZE = 128
_STACK_S = 2.0
"""Seconds that workers have to write their stacks."""
_SERVER = "processes/worker.py"
_OUTERMOST = ("<module>", "_run_module_as_main")
"""Frames of the main thread of a script, or of `python -m`."""
_PEERS = ("/torch/distributed/", "/worker/stage_link.py")
"""Files whose code waits for other ranks: in a collective, or until the next pipeline stage takes what was sent."""
_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')


class ActivityLog:
    """A worker's files: its last activity, and its stack, which it writes when SIGUSR1 arrives, even in native code. A
    worker on another machine than the driver's writes no files."""

    def __init__(self, scratch: str | None, rank: int):
        self._map: mmap.mmap | None = None
        if scratch is None:
            return
        self._stack = _stack_path(scratch, rank).open("w")
        faulthandler.register(signal.SIGUSR1, file=self._stack, all_threads=True)
        # Last: the driver sends the signal to those that have this file.
        with _activity_path(scratch, rank).open("w+b") as file:
            file.truncate(_SIZE)
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self.note("loading")

    def note(self, activity: str) -> None:
        """Writes what the worker does from now on. The file stays when the process ends."""
        if self._map is not None:
            self._map[:] = activity.encode()[:_SIZE].ljust(_SIZE, b"\0")


@dataclass(frozen=True)
class Sighting:
    """What was found out about one worker."""

    rank: int
    label: str
    """As `WorkerProcesses.labels`."""
    activity: str
    is_stopped: bool
    stack: tuple[str, ...]
    """Frames of the thread that computes, innermost first; empty where the process did not answer."""

    @property
    def waits_for_peers(self) -> bool:
        """Whether the worker is in a collective, or exchanges states with another stage: it waits for other ranks
        itself."""
        return any(path in frame for frame in self.stack for path in _PEERS)

    def __str__(self) -> str:
        state = "is stopped (by SIGSTOP or a debugger), " if self.is_stopped else ""
        where = f", and is in {self.stack[0]}" if self.stack else ""
        return f"rank {self.rank} ({self.label}) {state}last {self.activity}{where}"


def look_at(scratch: str, processes: Sequence[WorkerProcess], labels: Sequence[str]) -> list[Sighting]:
    """Returns a sighting of every worker, in rank order; `labels`: theirs. Takes at most two seconds."""
    stopped = [process.is_stopped() for process in processes]
    asked = [rank for rank in range(len(processes)) if not stopped[rank] and _activity_path(scratch, rank).exists()]
    for rank in asked:
        processes[rank].ask_for_stack()
    deadline = time.monotonic() + _STACK_S
    while time.monotonic() < deadline and not all(_stack(scratch, rank) for rank in asked):
        time.sleep(0.01)
    return [
        Sighting(rank, labels[rank], _activity(process, scratch, rank), stopped[rank], _stack(scratch, rank))
        for rank, process in enumerate(processes)
    ]


def suspects(sightings: Sequence[Sighting], waiting: set[int]) -> list[Sighting]:
    """Returns the workers that hold up the others: stopped ones, else those that do not wait for another rank.
    `waiting`: ranks whose answers are outstanding."""
    stopped = [sighting for sighting in sightings if sighting.is_stopped]
    at_work = [s for s in sightings if not s.waits_for_peers and not s.activity.startswith("finished")]
    unanswered = [sighting for sighting in sightings if sighting.rank in waiting]
    return stopped or at_work or unanswered


def _activity(process: WorkerProcess, scratch: str, rank: int) -> str:
    if process.local_pid is None:
        return "is on another machine, so what it did is not known"
    try:
        text = _activity_path(scratch, rank).read_bytes().rstrip(b"\0").decode(errors="replace")
    except OSError:
        text = ""
    return text or "started its interpreter"


def _stack(scratch: str, rank: int) -> tuple[str, ...]:
    """Frames of the thread that serves the connection, as far as they are written."""
    try:
        text = _stack_path(scratch, rank).read_text(errors="replace")
    except OSError:
        return ()
    for thread in text.split("\n\n"):
        frames = tuple(f"{name} ({file}:{line})" for file, line, name in _FRAME.findall(thread))
        # The outermost frame is written last, so that with it the stack is complete.
        if _SERVER in thread and frames and frames[-1].startswith(_OUTERMOST):
            return frames
    return ()


def _activity_path(scratch: str, rank: int) -> Path:
    return Path(scratch) / f"rank-{rank}.activity"


def _stack_path(scratch: str, rank: int) -> Path:
    return Path(scratch) / f"rank-{rank}.stack"
