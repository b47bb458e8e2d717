"""How many threads torch gets in one worker."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil

from dovetail.contracts.executor import ThreadCount


def worker_threads(asked: int | None, num_workers: int = 1, num_cores: int | None = None) -> ThreadCount:
    """Threads for each of `num_workers` workers that share this machine, at least 1.

    `asked` is what the config says; without it there is one per core of those that a worker is bound to (`num_cores`).
    Without these the OMP_NUM_THREADS of this process holds, as it does for torch alone, and else the workers share the
    physical cores that this process may use.
    """
    if asked is not None:
        return ThreadCount(asked, "executor.threads")
    if num_cores is not None:
        return ThreadCount(num_cores, "the cores that executor.cores binds a worker to")
    inherited = os.environ.get("OMP_NUM_THREADS", "")
    if inherited.isdecimal() and int(inherited) > 0:
        return ThreadCount(int(inherited), "OMP_NUM_THREADS")
    cores = usable_cores()
    shown = f"the {cores} physical cores that this process may use"
    shared = f"{shown}, over {num_workers} workers" if num_workers > 1 else shown
    return ThreadCount(max(1, cores // num_workers), shared)


class TorchThreads:
    """torch's number of threads in this process, which is the user's own and is given back."""

    def __init__(self) -> None:
        self._before: int | None = None

    def set(self, count: int) -> None:
        """From now on torch computes with `count` threads."""
        import torch

        before = torch.get_num_threads()
        if before != count:
            torch.set_num_threads(count)
            self._before = before

    def tell_thread(self) -> None:
        """Has torch's number in this thread's OpenMP too, from which native kernels take it. A new thread begins with
        one of its own until torch is asked in it."""
        import torch

        torch.get_num_threads()

    def restore(self) -> None:
        """The number before `set`. Idempotent."""
        if self._before is not None:
            import torch

            torch.set_num_threads(self._before)
            self._before = None


def usable_cores() -> int:
    """Physical cores, or fewer where CPU affinity or a container's CPU quota allows fewer."""
    limits = [psutil.cpu_count(logical=False), os.cpu_count(), _cgroup_cores()]
    if sys.platform == "linux":
        limits.append(len(os.sched_getaffinity(0)))
    return min((limit for limit in limits if limit), default=1)


def _cgroup_cores(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> int | None:
    # Affinity does not show a container's quota; more threads than it are throttled in turn.
    try:
        quota, period = path.read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return None
