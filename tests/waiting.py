"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    """Asserts that something comes true."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.005)
