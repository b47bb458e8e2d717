"""What a process does, in a file for the one that started it, which then knows where it hung or died."""

from __future__ import annotations

import faulthandler
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Journal:
    """What a process has found so far, in a file that is left if it hangs or dies."""

    def __init__(self, path: Path | None):
        self._path = path

    def write(self, found: Mapping[str, Any]) -> None:
        """One more line of JSON."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(found, default=repr)}\n")


class Watch:
    """Ends this process where one of its tasks does not end in time.

    The file is empty while no task runs. While one does, its first line names it; a process that hung, in Python or in
    C, leaves the stacks of its threads behind that line.
    """

    def __init__(self, path: Path | None, timeout_s: float):
        self._file = None if path is None else path.open("w", encoding="utf-8")
        self._timeout_s = timeout_s

    @contextmanager
    def task(self, name: str) -> Iterator[None]:
        """What runs inside is called `name`, one line of text."""
        if self._file is None:
            yield
            return
        self._file.write(f"{name}\n")
        self._file.flush()
        faulthandler.dump_traceback_later(self._timeout_s, exit=True, file=self._file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._file.seek(0)
            self._file.truncate()
