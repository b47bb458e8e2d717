"""Says which import takes long: a command whose plugin waits in its module's body looks as if it hangs itself."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 10.0
"""No plugin's import takes so long with a library as large as torch in it."""
T = TypeVar("T")


def warn_if_slow(label: str, imports: Callable[[], T]) -> T:
    """Calls `imports`, which imports what messages call `label`. One line on stderr says so if that takes longer than
    `PATIENCE_S`; it goes on all the same."""
    timer = threading.Timer(PATIENCE_S, _warn, (label, threading.get_ident()))
    timer.daemon = True  # a process that is interrupted does not wait for it
    timer.start()
    try:
        return imports()
    finally:
        timer.cancel()


def _warn(label: str, thread: int) -> None:
    place = module_line(thread)
    where = f": it is at {place}" if place else ""
    print(f"importing {label} takes more than {PATIENCE_S:g} s{where}", file=sys.stderr, flush=True)


def module_line(thread: int) -> str | None:
    """Where a thread is that imports: the line of the innermost module's body. None where it is in none."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename != __file__:
        if frame.f_code.co_name == "<module>":
            return f"{frame.f_code.co_filename}, line {frame.f_lineno}"
        frame = frame.f_back
    return None
