"""Waits for time to pass, or for somebody who presses q."""

from __future__ import annotations

import select
import sys
import threading
import time
from types import TracebackType


class Keyboard:
    """Keys come one by one while it is entered, where stdin is a terminal; elsewhere none come."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdin.isatty()
        self._never = threading.Event()

    def wait(self, seconds: float) -> bool:
        """Waits; True as soon as q is pressed."""
        if not self._is_terminal:
            return self._never.wait(seconds)
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if select.select([sys.stdin], [], [], left)[0] and sys.stdin.read(1) in ("q", "Q", ""):
                return True
        return False

    def __enter__(self) -> Keyboard:
        if self._is_terminal:
            import termios
            import tty

            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_terminal:
            import termios

            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)
