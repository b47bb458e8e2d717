"""Finds out what is on a machine, in a process of its own: what it imports, the agent does not keep."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from dovetail.contracts.joining import ComparesMachines
from dovetail.executors.nodes.messages import Inspect, Inspection

_TIMEOUT_S = 300.0


class Inspector:
    """Looks at this machine while the agent goes on."""

    def __init__(self, question: Inspect):
        self._question = question
        self._process: subprocess.Popen[bytes] | None = None
        self._problem = ""
        if question.spec is not None or question.device_type == "cuda":
            try:  # in the agent's main thread, as all of its children
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
            except OSError as error:
                self._problem = f"no process could be started that looks at this machine ({error})"
        self._answer: Inspection | None = None
        self._thread = threading.Thread(target=self._run, name="dovetail-inspection", daemon=True)
        self._thread.start()

    def answer(self) -> Inspection | None:
        """Returns what was found, or None while it is not known."""
        return self._answer

    def end(self) -> None:
        """Ends the process that looks. Idempotent."""
        if self._process is not None:
            self._process.kill()
        self._thread.join()

    def _run(self) -> None:
        facts, num_devices, problem, port = None, None, self._problem, 0
        try:
            if self._process is not None:
                facts, num_devices, problem = self._look(self._process)
            with socket.create_server(("", 0)) as free:
                port = free.getsockname()[1]
        except Exception as error:  # without an answer the engine would wait
            problem = f"{type(error).__name__}: {error}"
        self._answer = Inspection(facts, num_devices, port, time.time(), _machine(), problem)

    def _look(self, process: subprocess.Popen[bytes]) -> tuple[Any, int | None, str]:
        with process:
            try:
                output, _ = process.communicate(pickle.dumps(self._question), timeout=_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                return None, None, f"the process that looks at this machine was not done in {_TIMEOUT_S:g} s"
        if process.returncode:
            return None, None, f"the process that looks at this machine exited with code {process.returncode}"
        found: tuple[Any, int | None, str] = pickle.loads(output)
        return found


def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:  # not Linux
        return f"{uuid.getnode()}"


def main() -> None:
    """Reads a pickled `Inspect` from standard input and writes facts, devices and problem to standard output."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what plugins print goes to standard error
    question: Inspect = pickle.loads(sys.stdin.buffer.read())
    facts, num_devices, problem = None, None, ""
    try:
        if question.spec is not None:
            spec: ComparesMachines = pickle.loads(question.spec)
            facts = spec.machine_facts()
        if question.device_type == "cuda":
            import torch

            num_devices = torch.cuda.device_count()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    with output:
        output.write(pickle.dumps((facts, num_devices, problem)))


if __name__ == "__main__":
    main()
