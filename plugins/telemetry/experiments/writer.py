"""The thread that appends lines to a file. Nobody waits for it but `close`, and nobody hears of a full disk but the
log."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

Line = Callable[[], Mapping[str, Any]]
"""Makes the object of a line, in the thread that writes it."""

_LINGER_S = 0.5
"""How long lines wait for further ones."""


class LineWriter:
    """A bounded queue of lines, and the thread that writes them as JSON."""

    def __init__(self, path: Path, queue_size: int):
        """Raises `OSError` where the file cannot be appended to."""
        self._path = path
        self._queue_size = queue_size
        # Each write appends as a whole, so that several engines may share a file.
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._changed = threading.Condition()
        """Guards the next three."""
        self._waiting: deque[Line] = deque()
        self._num_dropped = 0
        """Lines that found the queue full, since the thread last looked."""
        self._is_closing = False
        self._num_lost = 0
        self._num_told = 0
        """Lost lines that the file tells of."""
        self._is_broken = False
        """Whether the last write failed; the next one begins a line of its own."""
        self._thread = threading.Thread(target=self._run, name="dovetail-experiments", daemon=True)
        self._thread.start()

    @property
    def num_lost(self) -> int:
        """Lines that could not be written."""
        return self._num_lost

    def put(self, line: Line) -> None:
        """Has a line written, or loses it. Does not wait."""
        with self._changed:
            if len(self._waiting) < self._queue_size:
                self._waiting.append(line)
                self._changed.notify()
            else:
                self._num_dropped += 1

    def close(self, timeout_s: float) -> None:
        """Writes what waits, and stops. Idempotent."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("telemetry sink experiments ends while %s still does not take its last lines", self._path)
            return  # the thread has the file
        if self._num_lost:
            logger.warning("telemetry sink experiments lost %d lines of %s", self._num_lost, self._path)

    def _run(self) -> None:
        try:
            while batch := self._next_batch():
                self._write(batch)
        finally:
            os.close(self._file)

    def _next_batch(self) -> list[Line]:
        """Waits for lines; an empty list is the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            if self._waiting:
                self._changed.wait_for(lambda: self._is_closing, _LINGER_S)
            batch = list(self._waiting)
            self._waiting.clear()
            self._num_lost += self._num_dropped
            self._num_dropped = 0
            return batch

    def _write(self, batch: list[Line]) -> None:
        lines = [_encoded(line()) for line in batch]
        num_lost = self._num_lost
        notes = [b""] if self._is_broken else []
        if num_lost > self._num_told:
            notes.append(_encoded({"event": "lost", "time": time.time(), "lines": num_lost - self._num_told}))
        data, error = b"\n".join([*notes, *lines, b""]), None
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as failure:
            error = failure
        if error is None:
            self._num_told, self._is_broken = num_lost, False
            return
        num_whole = data[:written].count(b"\n")
        if num_whole >= len(notes):
            self._num_told = num_lost
        self._num_lost += len(lines) - max(0, num_whole - len(notes))
        if not self._is_broken:
            logger.error(
                "telemetry sink experiments cannot write to %s (%s): lines are lost until it can again; requests are"
                " unharmed",
                self._path,
                error.strerror,
            )
        self._is_broken = True


def _encoded(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()
