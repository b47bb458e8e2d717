"""Records in host memory, the least recently used ones removed first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable


class RecentRecords:
    """Of at most so many bytes. Thread-safe."""

    def __init__(self, most_bytes: int):
        self._most = most_bytes
        self._bytes = 0
        self._records: OrderedDict[bytes, bytes] = OrderedDict()
        self._changed = threading.Condition()

    def put(self, key: bytes, record: memoryview) -> list[bytes]:
        """Keeps a copy. Returns the keys of those that were removed; the new one itself where it is too large."""
        with self._changed:
            if key in self._records:
                self._records.move_to_end(key)
                return []
            if record.nbytes > self._most:
                return [key]
            removed = []
            while self._bytes + record.nbytes > self._most:
                oldest, gone = self._records.popitem(last=False)
                self._bytes -= len(gone)
                removed.append(oldest)
            self._records[key] = bytes(record)
            self._bytes += record.nbytes
            self._changed.notify_all()
            return removed

    def get(self, key: bytes) -> bytes | None:
        """The record, which counts as used."""
        with self._changed:
            return self._find(key)

    def wait_for(self, key: bytes, timeout_s: float, is_over: Callable[[], bool]) -> bytes | None:
        """As `get`, for a record that may come within that time. `is_over`: nobody waits any more."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._records or is_over(), timeout_s)
            return self._find(key)

    def wake(self) -> None:
        """Those who wait look again."""
        with self._changed:
            self._changed.notify_all()

    def remove(self, key: bytes) -> None:
        """Forgets a record."""
        with self._changed:
            record = self._records.pop(key, None)
            self._bytes -= len(record) if record is not None else 0

    def clear(self) -> None:
        """Forgets all."""
        with self._changed:
            self._records.clear()
            self._bytes = 0

    def _find(self, key: bytes) -> bytes | None:
        record = self._records.get(key)
        if record is not None:
            self._records.move_to_end(key)
        return record
