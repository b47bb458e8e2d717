"""The suite of telemetry sinks, in both formats; all lines that it makes are lines of the protocol."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from dovetail_statsd.sink import StatsDSink

from dovetail.testing import TelemetrySinkSuite


class TestStatsD(TelemetrySinkSuite):
    plugin = StatsDSink

    @pytest.fixture
    def options(self, receiver: Any) -> Iterator[Mapping[str, Any]]:
        yield {"host": "127.0.0.1", "port": receiver.port}
        receiver.lines()


class TestDogStatsD(TestStatsD):
    @pytest.fixture
    def options(self, receiver: Any) -> Iterator[Mapping[str, Any]]:
        tags = {"env": "a:b|c,d"}
        yield {"host": "127.0.0.1", "port": receiver.port, "format": "dogstatsd", "tags": tags}
        receiver.lines()
