"""What the operating system says: memory of a process tree, and the share of the machine that others took.

Standard library only. Where there is no /proc the answers that need it are None.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_HAS_PROC = (_PROC / "self" / "stat").is_file()
QUIET_SHARE = 0.08
"""Below this share of the machine in others' hands a measurement starts."""


def _descendants(pid: int) -> list[int]:
    found = [pid]
    try:
        for task in (_PROC / str(pid) / "task").iterdir():
            for child in (task / "children").read_text().split():
                found += _descendants(int(child))
    except OSError:
        pass  # it ended meanwhile
    return found


def _own_cpu_seconds() -> float:
    ticks = 0
    for pid in _descendants(os.getpid()):
        try:
            fields = (_PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _busy_cpu_seconds() -> float:
    """Of all processors: user, nice, system, interrupts and what the hypervisor gave to others."""
    fields = [int(field) for field in (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class CPUClock:
    """A moment, to be asked later what others used since."""

    wall: float
    busy: float
    own: float

    @classmethod
    def now(cls) -> CPUClock | None:
        """None where there is no /proc."""
        return cls(time.perf_counter(), _busy_cpu_seconds(), _own_cpu_seconds()) if _HAS_PROC else None

    def foreign_share(self) -> float:
        """Share of the machine that other processes took since then, 0 to 1."""
        wall = time.perf_counter() - self.wall
        foreign = (_busy_cpu_seconds() - self.busy) - (_own_cpu_seconds() - self.own)
        return min(1.0, max(0.0, foreign / wall / (os.cpu_count() or 1)))


def wait_until_quiet(seconds: float) -> None:
    """Returns when others took little of the machine for half a second, or after `seconds`."""
    ends = time.perf_counter() + seconds
    quiet = 0
    while quiet < 2 and time.perf_counter() < ends:
        clock = CPUClock.now()
        time.sleep(0.25)
        quiet = quiet + 1 if clock is None or clock.foreign_share() < QUIET_SHARE else 0


def peak_memory_mb() -> float:
    """Largest resident memory of this process, and of its children that live, in MB; mapped files count."""
    unit = 1 if sys.platform == "darwin" else 1024
    total = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    for pid in _descendants(os.getpid())[1:] if _HAS_PROC else []:
        try:
            match = re.search(r"VmHWM:\s+(\d+) kB", (_PROC / str(pid) / "status").read_text())
        except OSError:
            continue
        total += int(match[1]) * 1024 if match else 0
    return total / 1e6


def describe() -> dict[str, str | int | None]:
    """The machine, for the record."""
    text = (_PROC / "cpuinfo").read_text() if _HAS_PROC else ""
    name = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    telling = re.compile(r"avx2|fma|f16c|avx512f|avx512_bf16|avx512_vnni|avx_vnni|amx_\w+|asimd\w*|bf16|i8mm|sve\w*")
    return {
        "processor": name[1] if name else platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "instructions": " ".join(f for f in flags[1].split() if telling.fullmatch(f)) if flags else None,
        "system": platform.platform(),
        "python": platform.python_version(),
    }
