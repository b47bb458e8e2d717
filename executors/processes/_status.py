"""What a worker's process reports of itself once per second, apart from its steps and calls."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import psutil

PERIOD_S = 1.0


class Report(NamedTuple):
    """What one process has and does."""

    pid: int
    memory_bytes: int
    """Resident."""
    device_bytes: int | None
    """That tensors take on the GPU; None without one."""
    num_steps: int
    busy_s: float
    """In steps since the start, the one that runs included."""
    last_step_s: float | None
    """How long the last one took that is done; None before the first."""
    running_s: float | None
    """How long the step runs that is under way; None where none is."""


class StatusReporter:
    """Counts a worker's steps, and sends reports from a thread of its own, so also while a step hangs."""

    def __init__(self, device: str, send: Callable[[Report], None]):
        """`device`: as `Placement.device`. `send` raises OSError once nobody listens."""
        self._device = device
        self._send = send
        self._num_steps = 0
        self._busy_s = 0.0
        self._last_step_s: float | None = None
        self._began: float | None = None

    def start(self) -> None:
        """Sends the first report and the following ones."""
        threading.Thread(target=self._run, name="dovetail-status", daemon=True).start()

    def step_begins(self) -> None:
        """A step is computed from now on."""
        self._began = time.perf_counter()

    def step_ends(self) -> None:
        """The step is done, or failed."""
        began, self._began = self._began, None
        if began is not None:
            self._last_step_s = time.perf_counter() - began
            self._busy_s += self._last_step_s
            self._num_steps += 1

    def _run(self) -> None:
        process = psutil.Process()
        try:
            while True:
                self._send(self._report(process))
                time.sleep(PERIOD_S)
        except (OSError, ValueError):  # the connection has ended, at the other side or at ours
            return

    def _report(self, process: psutil.Process) -> Report:
        began = self._began
        running_s = None if began is None else time.perf_counter() - began
        return Report(
            pid=os.getpid(),
            memory_bytes=process.memory_info().rss,
            device_bytes=device_bytes(self._device),
            num_steps=self._num_steps,
            busy_s=self._busy_s + (running_s or 0.0),
            last_step_s=self._last_step_s,
            running_s=running_s,
        )


def device_bytes(device: str) -> int | None:
    """Bytes of tensors of this process on a GPU; None on other devices."""
    torch = sys.modules.get("torch")  # the worker's, which is not imported for this
    if torch is None or not device.startswith("cuda"):
        return None
    return int(torch.cuda.memory_allocated(device))
