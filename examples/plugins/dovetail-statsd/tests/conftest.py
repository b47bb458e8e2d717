"""A StatsD that keeps what it receives."""

from __future__ import annotations

import re
import socket
from collections import defaultdict
from collections.abc import Iterator

import pytest

LINE = re.compile(
    r"(?P<name>[^:|@#\s]+):(?P<value>\d+(?:\.\d+)?)\|(?P<kind>c|g|ms)(?:\|#(?P<tags>[^:|@#,\s]+:[^:|@#,\s]+"
    r"(?:,[^:|@#,\s]+:[^:|@#,\s]+)*))?"
)
"""As the protocols have it: values of gauges without a sign, since a sign would add to them."""


class Receiver:
    """A UDP port of this machine."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.packets: list[bytes] = []

    def wait(self) -> None:
        """Waits for a datagram."""
        self._socket.settimeout(60)
        self.packets.append(self._socket.recv(65536))

    def lines(self) -> list[re.Match[str]]:
        """All that came so far; what is no line of the protocol is an error."""
        self._socket.setblocking(False)
        try:
            while True:
                self.packets.append(self._socket.recv(65536))
        except BlockingIOError:
            pass
        matches = [LINE.fullmatch(line) for packet in self.packets for line in packet.decode().split("\n")]
        assert None not in matches, self.packets
        return [match for match in matches if match is not None]

    def counts(self) -> dict[str, float]:
        """Sum of each counter, tags aside."""
        sums: dict[str, float] = defaultdict(float)
        for line in self.lines():
            if line["kind"] == "c":
                sums[line["name"]] += float(line["value"])
        return dict(sums)

    def values(self, name: str) -> list[float]:
        """All values of one name, in order."""
        return [float(line["value"]) for line in self.lines() if line["name"] == name]

    def close(self) -> None:
        """Closes the port."""
        self._socket.close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """Closed at the end."""
    receiver = Receiver()
    yield receiver
    receiver.close()
