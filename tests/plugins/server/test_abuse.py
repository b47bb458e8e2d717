"""What a real server bears: clients that leave at the worst moment, do not read, or ask for work without end, and an
engine that stands still. Real processes over real sockets; the server has one place for requests that run, and takes
four tokens of a prompt per step."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.plugins.server.test_serve import COMPLETE, Served, metric, read_stream, serving
from tests.waiting import wait_until

MAX_LEN = 32768
ENDLESS = {"prompt": "Once", "max_tokens": 32000, "temperature": 0, "ignore_eos": True, "stream": True}
LONG = {**ENDLESS, "max_tokens": 2500}
SHORT = {**ENDLESS, "max_tokens": 200}


@pytest.fixture(scope="module")
def served(story_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = (
        f"model.max_model_len={MAX_LEN}",
        f"model.hf_overrides.max_position_embeddings={MAX_LEN}",
        "model.hf_overrides.eos_token_id=2",
        "cache.num_blocks=16384",
        "scheduler.max_num_seqs=1",
        "scheduler.max_num_batched_tokens=4",
    )
    arguments = [part for option in options for part in ("-o", option)]
    with serving(story_model, tmp_path_factory.mktemp("abuse"), *arguments) as started:
        yield started


@pytest.fixture(autouse=True)
def the_server_is_unharmed(served: Served) -> Iterator[None]:
    """After each test nothing is held, and the next request is answered."""
    yield
    wait_until(lambda: is_free(served), "no request is left, and no KV block is held")
    assert served.post(COMPLETE).json()["choices"][0]["finish_reason"] == "length"


def is_free(served: Served) -> bool:
    gauges = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
    return all(metric(served, f"vllm:{name}") == 0 for name in gauges)


def num_generated(served: Served) -> float:
    return metric(served, "vllm:generation_tokens_total")


def num_aborted(served: Served) -> float:
    lines = httpx.get(f"{served.url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if 'finished_reason="abort"' in line)


@contextmanager
def sent(served: Served, body: dict[str, Any], receive_buffer: int | None = None) -> Iterator[socket.socket]:
    """A connection over which a request was sent. Leaving the block closes it."""
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nconnection: close\r\n"
    with socket.socket() as connection:
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(60)
        url = httpx.URL(served.url)
        connection.connect((url.host, url.port))
        connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        yield connection


@contextmanager
def running(served: Served) -> Iterator[socket.socket]:
    """A stream takes the only place."""
    with sent(served, ENDLESS) as connection:
        assert connection.recv(4096)
        yield connection


def test_a_client_that_leaves_the_queue(served: Served) -> None:
    aborted = num_aborted(served)
    with running(served):
        with sent(served, ENDLESS):
            wait_until(lambda: metric(served, "vllm:num_requests_waiting") == 1, "the request waits")
        wait_until(lambda: num_aborted(served) == aborted + 1, "the request is aborted")
        assert metric(served, "vllm:num_requests_waiting") == 0
        assert metric(served, "vllm:num_requests_running") == 1


def test_a_client_that_leaves_while_its_prompt_is_computed(served: Served) -> None:
    generated = num_generated(served)
    with sent(served, {**ENDLESS, "prompt": [300] * (MAX_LEN - 10), "max_tokens": 1, "stream": False}):
        wait_until(lambda: metric(served, "vllm:kv_cache_usage_perc") > 0, "the prompt is computed")
    wait_until(lambda: is_free(served), "the blocks are free")
    assert num_generated(served) == generated


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_tokens_are_generated(served: Served, stream: bool) -> None:
    generated = num_generated(served)
    with sent(served, {**ENDLESS, "stream": stream}):
        wait_until(lambda: num_generated(served) > generated, "tokens are generated")
    wait_until(lambda: is_free(served), "the blocks are free")
    assert num_generated(served) < generated + ENDLESS["max_tokens"]


def test_a_client_that_leaves_between_two_frames(served: Served) -> None:
    generated = num_generated(served)
    with sent(served, ENDLESS) as connection:
        received = b""
        while received.count(b"data: ") < 3:
            received += connection.recv(4096)
    wait_until(lambda: is_free(served), "the blocks are free")
    assert num_generated(served) < generated + ENDLESS["max_tokens"]


@pytest.mark.nightly
def test_a_reader_of_one_byte_at_a_time_holds_up_nobody(served: Served) -> None:
    """The engine is done with its request long before; what was not read is merged, and nothing of it is lost."""
    whole = read_stream(served, LONG)
    (api,) = served.children("api_process")
    before = api.memory_info().rss
    with sent(served, LONG, receive_buffer=2048) as connection:
        received = connection.recv(1)
        while not is_free(served):
            received += connection.recv(1)
        assert served.post(COMPLETE).status_code == 200
        assert b"[DONE]" not in received
        assert api.memory_info().rss - before < 8 * 2**20
        received += rest_of(connection)
    texts = texts_of(received)
    assert "".join(texts) == whole
    assert len(texts) < LONG["max_tokens"]


def rest_of(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def texts_of(received: bytes) -> list[str]:
    """Of the frames of a stream."""
    lines = [line for line in received.decode().splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines]


BIG: dict[str, tuple[dict[str, Any], str]] = {
    "a million stop strings": ({"stop": [f"s{index}" for index in range(700_000)]}, "stop"),
    "a million equal stop strings": ({"stop": ["a"] * 1_000_000}, "stop"),
    "a million bad words": ({"bad_words": ["a"] * 1_000_000}, "bad_words"),
    "a million stop tokens": ({"stop_token_ids": [10**6] * 1_000_000}, "stop_token_ids"),
    "a million biases": ({"logit_bias": {str(index): 1 for index in range(500_000)}}, "logit_bias"),
    "a prompt of a million tokens": ({"prompt": [1] * 1_000_000}, ""),
    "a prompt of a million characters": ({"prompt": "a b " * 250_000}, ""),
    "a schema with 100,000 alternatives": (
        {"guided_json": {"anyOf": [{"const": f"alternative {index}"} for index in range(100_000)]}},
        "guided_json",
    ),
    "a schema with 100,000 objects": (
        {"guided_json": {"anyOf": [{"properties": {f"p{index}": {"type": "integer"}}} for index in range(100_000)]}},
        "guided_json",
    ),
    "an enumeration of 100,000 values": ({"guided_json": {"enum": list(range(100_000))}}, "guided_json"),
    "a schema that is itself": ({"guided_json": {"$ref": "#"}}, "guided_json"),
    "schemas that are each other": (
        {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
        "guided_json",
    ),
    "a schema nested 300 levels deep": (
        {"guided_json": json.loads('{"items":' * 300 + "{}" + "}" * 300)},
        "guided_json",
    ),
}


@pytest.mark.parametrize("label", BIG)
def test_work_without_end_is_refused_while_streams_go_on(
    served: Served, check_error: Callable[..., dict[str, Any]], label: str
) -> None:
    fields, param = BIG[label]
    with running(served) as stream:
        body = {"prompt": "Once", "max_tokens": 4, **fields}
        check_error(served.post(body), 400, param or None)
        assert b"[DONE]" not in stream.recv(1 << 20)
        assert httpx.get(f"{served.url}/health", timeout=60).status_code == 200


def test_a_schema_that_contains_itself_is_served(served: Served) -> None:
    """A tree: what may be refused is what allows no text."""
    node = {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False}
    form = {"json": node, "max_whitespace": 0}
    (choice,) = served.post({**COMPLETE, "max_tokens": 40, "structured_outputs": form}).json()["choices"]
    assert choice["text"].startswith("{")
    if choice["finish_reason"] == "stop":
        json.loads(choice["text"])


def test_a_body_of_eight_megabytes(served: Served, check_error: Callable[..., dict[str, Any]]) -> None:
    """The largest that is read, and one byte more."""
    limit = 8 * 2**20
    body = json.dumps({"prompt": "", "user": ""}).encode()
    body = body.replace(b'"user": ""', b'"user": "' + b"a" * (limit - len(body)) + b'"')
    headers = {"content-type": "application/json"}
    url = f"{served.url}/v1/completions"
    check_error(httpx.post(url, content=body, headers=headers, timeout=60), 400)
    check_error(httpx.post(url, content=body + b" ", headers=headers, timeout=60), 413)


def test_an_engine_that_stands_still(served: Served, check_error: Callable[..., dict[str, Any]]) -> None:
    """Health and requests are 503 meanwhile, in seconds; a stream goes on afterwards as if nothing had been."""
    whole = read_stream(served, SHORT)
    (engine,) = served.children("engine_process")
    with sent(served, SHORT) as stream:
        received = stream.recv(4096)
        os.kill(engine.pid, signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(3) as pool:
                health = pool.submit(httpx.get, f"{served.url}/health", timeout=60)
                asked = [pool.submit(served.post, COMPLETE) for _ in range(2)]
                check_error(health.result(), 503)
                for answer in asked:
                    assert "retry-after" in answer.result().headers
                    check_error(answer.result(), 503)
            assert httpx.get(f"{served.url}/live", timeout=60).status_code == 200
        finally:
            os.kill(engine.pid, signal.SIGCONT)
        received += rest_of(stream)
    assert "".join(texts_of(received)) == whole
    wait_until(lambda: served.post(COMPLETE).status_code == 200, "requests are answered again")
