"""Lines and datagrams."""

from __future__ import annotations

import logging
import socket
from itertools import pairwise
from typing import Any

import pytest
from dovetail_statsd.lines import Lines, datagrams
from dovetail_statsd.sink import StatsDSink
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.contracts.errors import ConfigError
from dovetail.contracts.plugin import Environment
from dovetail.testing.telemetry_suite import ENGINE, request_stats, step_stats


def sink(receiver: Any, **options: Any) -> StatsDSink:
    """One that has started."""
    made = StatsDSink(StatsDSink.Options(host="127.0.0.1", port=receiver.port, **options))
    made.on_start(ENGINE)
    return made


@settings(deadline=None)
@given(
    st.lists(st.text("ab:\u00e9\U0001f54a", min_size=1, max_size=40)),
    st.integers(1, 90),
)
def test_datagrams_hold_all_lines_in_order_and_none_is_too_long(lines: list[str], most: int) -> None:
    packets = list(datagrams(lines, most))
    assert b"\n".join(packets).decode() == "\n".join(lines)
    assert all(len(packet) <= most or b"\n" not in packet for packet in packets)
    # As few as may be: none would have taken the first line of the next one.
    for packet, following in pairwise(packets):
        assert len(packet) + 1 + len(following.split(b"\n")[0]) > most


def test_formats() -> None:
    labels, tags = (("finish_reason", "stop"),), (("drafter", "my:drafter"),)
    plain, tagged = Lines("statsd", "app", {"model": "m"}), Lines("dogstatsd", "", {"model": "hf:org/m"})
    assert plain.line("requests", 2, "c", labels, tags) == "app.requests.stop:2|c"
    assert tagged.line("requests", 2, "c", labels, tags) == (
        "requests:2|c|#model:hf_org/m,finish_reason:stop,drafter:my_drafter"
    )
    assert plain.line("kv_usage", 0.25, "g") == "app.kv_usage:0.25|g"
    assert plain.line("kv_usage", 0.0, "g") == "app.kv_usage:0|g"


def test_counts_are_summed_and_timings_are_not(receiver: Any) -> None:
    measured = sink(receiver, flush_s=600)
    for number in range(3):
        measured.on_step(step_stats(number, num_generated_tokens=5, duration=0.25))
        measured.on_request(request_stats(number))
    measured.close()
    assert receiver.counts()["dovetail.generated_tokens"] == 15
    assert receiver.counts()["dovetail.requests.stop"] == 3
    assert receiver.values("dovetail.step_duration") == [250.0] * 3
    assert receiver.values("dovetail.time_to_first_token") == [1000.0] * 3
    assert len([line for line in receiver.lines() if line["kind"] == "c" and "generated" in line["name"]]) == 1


def test_an_idle_engine_sends_its_last_step_without_being_closed(receiver: Any) -> None:
    measured = sink(receiver, flush_s=0.05)
    measured.on_step(step_stats(1, num_running=7))
    receiver.wait()
    assert receiver.values("dovetail.running") == [7]
    measured.close()


def test_timings_beyond_the_limit_are_counted(receiver: Any) -> None:
    measured = sink(receiver, max_timings=4, flush_s=600)
    for number in range(10):
        measured.on_step(step_stats(number))
    measured.close()
    assert len(receiver.values("dovetail.step_duration")) == 4
    assert receiver.counts()["dovetail.dropped_timings"] == 6
    assert receiver.counts()["dovetail.steps"] == 10


def test_a_port_where_nobody_listens_is_logged_once(receiver: Any, caplog: pytest.LogCaptureFixture) -> None:
    receiver.close()
    measured = sink(receiver, packet_bytes=1, flush_s=600)
    for number in range(20):
        measured.on_step(step_stats(number))
    with caplog.at_level(logging.WARNING):
        measured.close()
    assert [record.name for record in caplog.records] == ["dovetail_statsd"]
    assert "does not take measurements" in caplog.text


def test_what_cannot_be_is_refused() -> None:
    environment = Environment("cpu", num_cpus=1, memory_bytes=1 << 30)
    assert StatsDSink.check(None, StatsDSink.Options(format="dogstatsd", tags={"a": "b"}), environment) == []
    (reason,) = StatsDSink.check(None, StatsDSink.Options(tags={"a": "b"}), environment)
    assert "dogstatsd" in reason
    with pytest.raises(ConfigError, match=r"nowhere\.invalid"):
        StatsDSink(StatsDSink.Options(host="nowhere.invalid"))


def test_a_name_with_two_addresses_means_the_one_of_ipv4(monkeypatch: pytest.MonkeyPatch, receiver: Any) -> None:
    real = socket.getaddrinfo

    def both(host: str, port: int, **hints: Any) -> list[Any]:
        six = (socket.AF_INET6, socket.SOCK_DGRAM, 17, "", ("::1", port, 0, 0))
        return [six, *real("127.0.0.1", port, **hints)]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    made = StatsDSink(StatsDSink.Options(host="localhost", port=receiver.port))
    made.on_start(ENGINE)
    made.on_step(step_stats(1))
    made.close()
    assert receiver.counts()["dovetail.steps"] == 1
