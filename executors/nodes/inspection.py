"""Finds out what is on a machine, in a process of its own: what it imports, the agent does not keep."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

from dovetail.contracts.joining import ComparesMachines
from dovetail.executors.nodes.messages import Inspect, Inspection

_TIMEOUT_S = 300.0


def inspect(question: Inspect) -> Inspection:
    """Answers for this machine."""
    facts, num_devices, problem = None, None, ""
    if question.spec is not None or question.device_type == "cuda":
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            input=pickle.dumps(question),
            stdout=subprocess.PIPE,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            problem = f"the process that looks at this machine exited with code {done.returncode}"
        else:
            facts, num_devices, problem = pickle.loads(done.stdout)
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    return Inspection(facts, num_devices, port, time.time(), _machine(), problem)


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
