"""Server-sent events, cut out of whatever pieces the network brings."""

from __future__ import annotations


class EventReader:
    """Takes the bytes of a stream and returns the data of each event that they complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Returns the data of the events that end in this piece; lines of one event are joined by newlines."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        found = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data:
                    found.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return found
