"""Routers of other projects over the replicas of `dovetail simulate-routing`.

    python benchmarks/routing_peers.py synthetic_trace.jsonl --replicas 32 --speed 6 \
        --sglang /path/to/venv/bin/sglang-router --vllm /path/to/venv/bin/vllm-router

The peer's real router process runs, over workers that speak HTTP and compute nothing. The simulation's clock is
virtual: a request is sent to the router when it arrives there, the worker that gets it is the replica that simulates
it, and the worker answers when the simulation says that the request ended. So the router sees the loads that it would
see, in the order in which it would; what it decides by the clock (eviction of its tree) it does not get to.

A prompt's text is CHARS letters for each of the trace's blocks, so that equal blocks are equal texts, and the number of
the request at its end, by which a worker knows it. It is in no field that a router could take for a session.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import socket
import subprocess
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import httpx

from dovetail.commands.arrivals import BLOCK_TOKENS, read_trace
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.router import FollowsRequests, ReplicaState, RoutedRequest, RouterSetup
from dovetail.plugins.commands.simulate_routing.replica import CostModel
from dovetail.plugins.commands.simulate_routing.report import summarize
from dovetail.plugins.commands.simulate_routing.simulation import Simulation
from dovetail.plugins.commands.simulate_routing.workload import simulated_requests

CHARS = 32
START_S = 120.0
"""The router must answer within this time, with all workers."""
ANSWER_S = 60.0
"""A request must reach a worker within this time."""
ANSWER = b'{"text": "", "model_path": "m", "status": "ok", "data": [{"id": "m"}], "choices": []}'
RENDER_PATH = "/v1/completions/render"
"""Where vllm-router asks for a prompt's tokens. Without an answer it does not compare prefixes."""
Value = TypeVar("Value")


class Workers:
    """HTTP servers of one event loop, one for each replica."""

    def __init__(self, path: str) -> None:
        """`path`: of requests. POSTs to others are answered with 404, as by a worker that does not have them."""
        self._path = path
        self.ports: list[int] = []
        self._servers: list[asyncio.Server] = []
        self.arrived: dict[str, asyncio.Future[int]] = {}
        """By request id: the replica that got it."""
        self._release: dict[str, asyncio.Event] = {}

    async def start(self, count: int) -> None:
        for index in range(count):
            server = await asyncio.start_server(self._serve(index), "127.0.0.1", 0, limit=1 << 24, backlog=1024)
            self._servers.append(server)
            self.ports.append(server.sockets[0].getsockname()[1])

    def expect(self, request_id: str) -> asyncio.Future[int]:
        self._release[request_id] = asyncio.Event()
        self.arrived[request_id] = asyncio.get_running_loop().create_future()
        return self.arrived[request_id]

    def release(self, request_id: str) -> None:
        self._release.pop(request_id).set()

    def _serve(self, index: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while True:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
                    length = next((int(line[15:]) for line in head if line.startswith("content-length:")), 0)
                    body = await reader.readexactly(length)
                    status, answer = await self._answer(index, head[0], body)
                    writer.write(
                        b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                        % (status, len(answer), answer)
                    )
                    await writer.drain()
            except (asyncio.IncompleteReadError, ConnectionError):
                writer.close()

        return serve

    async def _answer(self, index: int, line: str, body: bytes) -> tuple[bytes, bytes]:
        """Status and body. A request waits until the simulation ends it; all else is answered at once."""
        if not line.startswith("post "):
            return b"200 OK", ANSWER
        if line.startswith(f"post {RENDER_PATH} "):
            return b"200 OK", rendered(json.loads(body)["prompt"])
        if not line.startswith(f"post {self._path} "):
            return b"404 Not Found", ANSWER
        fields = json.loads(body)
        request_id = (fields.get("prompt") or fields["text"]).rpartition(" ")[2]
        done = self._release[request_id]
        self.arrived[request_id].set_result(index)
        await done.wait()
        return b"200 OK", ANSWER


class PeerRouter(FollowsRequests):
    """Asks the peer's process. `choose` and `finished` wait until the peer has done its part."""

    contract: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, setup: RouterSetup, command: Sequence[str], path: str, texts: dict[str, str]):
        super().__init__(PluginOptions(), setup)
        self._texts = texts
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._workers = Workers(path)
        self._answers: dict[str, Future[None]] = {}
        self._run(self._workers.start(setup.num_replicas))
        port, metrics_port = _free_port(), _free_port()
        urls = [f"http://127.0.0.1:{each}" for each in self._workers.ports]
        self._process = subprocess.Popen(
            [
                *command,
                *("--host", "127.0.0.1", "--port", str(port)),
                *("--prometheus-port", str(metrics_port), "--worker-urls"),
                *urls,
            ],
            stdout=subprocess.DEVNULL,
        )
        self._url = f"http://127.0.0.1:{port}"
        self._path = path
        self._client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
        self._run(self._wait_until_ready())

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> int:
        arrived = self._run(self._send(request.request_id, request.max_tokens))
        return arrived

    def prefilled(self, request_id: str) -> None:
        """The peers notice the end of a request alone."""

    def finished(self, request_id: str) -> None:
        self._loop.call_soon_threadsafe(self._workers.release, request_id)
        self._answers.pop(request_id).result(ANSWER_S)

    def replica_lost(self, replica: int) -> None:
        raise AssertionError("no simulated replica is lost")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._run(self._client.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, work: Coroutine[Any, Any, Value]) -> Value:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_S + ANSWER_S)

    async def _send(self, request_id: str, max_tokens: int) -> int:
        arrived = self._workers.expect(request_id)
        self._answers[request_id] = asyncio.run_coroutine_threadsafe(self._ask(request_id, max_tokens), self._loop)
        return await asyncio.wait_for(arrived, ANSWER_S)

    async def _ask(self, request_id: str, max_tokens: int) -> None:
        text = f"{self._texts[request_id]} {request_id}"
        body: dict[str, Any] = {"model": "m", "prompt": text, "max_tokens": max_tokens}
        if self._path == "/generate":
            body = {"text": text, "sampling_params": {"max_new_tokens": max_tokens}}
        response = await self._client.post(self._url + self._path, json=body)
        response.raise_for_status()

    async def _wait_until_ready(self) -> None:
        """Until a request goes through."""
        ends = self._loop.time() + START_S
        while True:
            try:
                response = await self._client.get(self._url + "/health")
                if response.status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if self._process.poll() is not None or self._loop.time() > ends:
                raise SystemExit(f"the router does not answer (exit status {self._process.poll()})")
            await asyncio.sleep(0.5)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def rendered(text: str) -> bytes:
    """What vLLM answers to `RENDER_PATH`, with a token for each letter."""
    request = {"request_id": "r", "token_ids": list(text.encode()), "sampling_params": {}, "model": "m"}
    return json.dumps([request]).encode()


def text_of(blocks: Sequence[int]) -> str:
    """A prompt with these blocks."""
    return "".join(blake2b(str(block).encode(), digest_size=CHARS // 2).hexdigest() for block in blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--replicas", type=int, default=32)
    parser.add_argument("--speed", type=float, default=6.0)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--sglang", help="sglang-router's command")
    parser.add_argument("--vllm", help="vllm-router's command")
    args = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    trace = read_trace(args.trace, limit=args.limit, speed=args.speed, option="TRACE")
    requests = simulated_requests(trace)
    texts = {str(number): text_of(traced.blocks) for number, traced in enumerate(trace)}
    costs = CostModel(
        prefill_rate=10_000.0,
        decode_step=0.02,
        chunk_tokens=2048,
        max_running=64,
        num_blocks=1000,
        block_size=BLOCK_TOKENS,
    )
    peers = {
        "sglang-router": ([args.sglang, "launch"], "/generate") if args.sglang else None,
        "vllm-router": ([args.vllm, "--disable-retries"], "/v1/completions") if args.vllm else None,
    }
    for label, given in peers.items():
        if given is None:
            continue
        router = PeerRouter(RouterSetup(num_replicas=args.replicas, block_size=BLOCK_TOKENS), *given, texts)
        try:
            outcome = Simulation(router, args.replicas, costs, 4096, label).run(requests, lambda _: None)
        finally:
            router.close()
        print(json.dumps(asdict(summarize(label, outcome))))


if __name__ == "__main__":
    main()
