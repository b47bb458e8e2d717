"""`dovetail serve --data-parallel-size 2`: real processes that are stopped and killed while HTTP requests run."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from dovetail.plugins.commands.top.scrape import Snapshot, parse
from dovetail.plugins.server.replica_machine import replica_shares
from tests.plugins.server.test_serve import COMPLETE, LONG, Served, serving, stopped
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def served(story_model: Path, holding_site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = ("--data-parallel-size", "2", "-o", "server.router=round_robin", "-o", "telemetry=[prometheus, holding]")
    path = os.pathsep.join([str(holding_site), *sys.path])
    with serving(story_model, tmp_path_factory.mktemp("replicas"), *options, PYTHONPATH=path) as started:
        yield started


def engines(served: Served) -> list[psutil.Process]:
    """By replica."""
    return sorted(served.children("engine_process"), key=lambda process: process.cmdline()[-1])


def read_to_error(served: Served, request_id: str, runs: threading.Event) -> str:
    """The error that ends a stream. `runs` is set when its first text is there."""
    body = {**LONG, "request_id": request_id}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return str(event["error"]["message"])
                runs.set()
    raise ConnectionError("the stream ended without an error")


def metrics(served: Served) -> Snapshot:
    return parse(httpx.get(f"{served.url}/metrics", timeout=60).text)


def num_tokens(served: Served, replica: int) -> float:
    """That this replica has generated, by the server's metrics."""
    samples = metrics(served).of("vllm:generation_tokens_total")
    return sum(count for labels, count in samples.items() if dict(labels)["engine"] == str(replica))


def is_up(served: Served, replica: int) -> bool:
    """Whether the server's metrics say that this replica takes requests; it is named there in any case."""
    samples = metrics(served)
    assert {dict(labels)["engine"] for labels in samples.of("dovetail:replica_up")} == {"0", "1"}
    return bool(samples.of("dovetail:replica_up")[("engine", str(replica)),])


def test_each_replica_runs_on_its_share_of_the_cores(served: Served) -> None:
    shares = [share.cores or frozenset(psutil.Process().cpu_affinity()) for share in replica_shares(2)]
    assert [frozenset(process.cpu_affinity()) for process in engines(served)] == shares


def test_a_replica_that_is_stopped_costs_no_request(served: Served) -> None:
    """And its counters stay in the metrics."""
    texts = {served.post(COMPLETE).json()["choices"][0]["text"] for _ in range(2)}
    had = num_tokens(served, 0)
    with stopped(engines(served)[0]), ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(served.post, [COMPLETE] * 4))
        assert [answer.status_code for answer in answers] == [200] * 4
        assert {answer.json()["choices"][0]["text"] for answer in answers} == texts
        assert not is_up(served, 0)
        assert num_tokens(served, 0) == had > 0
    wait_until(lambda: is_up(served, 0), "it answers again")


def test_streams_of_killed_replicas_name_them_and_none_left_is_503(served: Served) -> None:
    with ThreadPoolExecutor(2) as pool:
        begun = [threading.Event() for _ in range(2)]
        streams = [pool.submit(read_to_error, served, f"{index}-held-begun", runs) for index, runs in enumerate(begun)]
        for runs in begun:
            assert runs.wait(60), "a stream does not begin"
        for process in engines(served):
            process.kill()
        errors = [stream.result() for stream in streams]
    named = {index for index in range(2) for error in errors if f"replica {index} failed while it had request" in error}
    assert named == {0, 1}
    assert all("not retried" in error for error in errors)
    answer = served.post(COMPLETE)
    assert answer.status_code == 503
    assert "replica 1: its process ended, or starts" in answer.json()["error"]["message"]
