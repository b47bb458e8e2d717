"""What became of requests that met a fault, and the table of it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

import psutil
from leftovers import shared_memory

HEADER = (
    "| fault | times | done | failed, error names it | failed otherwise | wrong tokens | left behind"
    " | seconds: median | most | |\n" + "| --- " * 10 + "|"
)


@dataclass
class Count:
    """Of one fault."""

    times: int = 0
    done: int = 0
    named: int = 0
    """Requests that failed with an error that says what failed."""
    unnamed: list[str] = field(default_factory=list)
    """Errors of the other failed requests."""
    wrong: int = 0
    """Requests whose tokens are others than without the fault."""
    seconds: list[float] = field(default_factory=list)
    """From the fault until it was noticed: the request that met it was done, or its error was there."""
    notes: list[str] = field(default_factory=list)
    left: int = 0

    def row(self, fault: str) -> str:
        """A line of the table."""
        times = (
            [f"{value:.2f}" for value in (statistics.median(self.seconds), max(self.seconds))] if self.seconds else []
        )
        numbers = (self.times, self.done, self.named, len(self.unnamed), self.wrong, self.left)
        cells = [fault, *map(str, numbers), *(times or ["", ""]), "; ".join(self.notes + self.unnamed[:1])]
        return f"| {' | '.join(cells)} |"


def traces() -> set[str]:
    """Files of shared memory of this user, and processes under this one."""
    return shared_memory() | {f"{one.pid}" for one in psutil.Process().children(recursive=True)}
