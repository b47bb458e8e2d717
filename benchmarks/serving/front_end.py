"""What a server's front end costs: streams of tokens over real sockets from an engine that computes nothing.

    python benchmarks/serving/front_end.py [--streams 64] [--tokens 1000] [--steps 10 2 0] [--repeats 3]

An engine's process with `PacedTokens` gives each stream one token per step; one API process makes text and frames; this
process reads them from raw sockets and counts frames. A step of 0 ms is as fast as the engine can: readers lag, and
frames are merged. Prints tokens per second, frames per token, and the CPU time of the API process and of the engine's
process per token (/proc), each the median of the repeats.

Other measurements: --no-stream (whole responses per second), --first-token (what the server adds to the time to the
first token), --gaps (gaps between frames at 64 streams x 10 ms, alone, with prompts of 100,000 tokens that are
tokenized meanwhile, and with /metrics read all the time).
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.serving.null_engine import null_config, save_null_model

_READ = 1 << 18


@dataclass(frozen=True)
class Server:
    """A server that runs."""

    port: int
    process: subprocess.Popen[bytes]

    def child(self, module: str) -> psutil.Process:
        """The process that runs this module."""
        children = psutil.Process(self.process.pid).children()
        return next(child for child in children if any(module in part for part in child.cmdline()))


@contextmanager
def serving(step_ms: float, streams: int) -> Iterator[Server]:
    """`dovetail serve` with the null engine."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        save_null_model(directory)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        config = null_config(directory, step_ms=step_ms, max_num_seqs=streams)
        config["server"] = {"port": port, "served_model_name": ["null"], "access_log": False, "log_level": "warning"}
        file = directory / "engine.json"
        file.write_text(json.dumps(config))
        command = [sys.executable, "-m", "dovetail", "serve", str(file)]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:
                _wait_until_ready(port)
                yield Server(port, process)
            finally:
                process.terminate()


def _wait_until_ready(port: int) -> None:
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready") as response:
                if response.status == 200:
                    return
        except OSError:
            time.sleep(0.1)


def request(num_tokens: int, *, stream: bool = True, prompt: str = "hello") -> bytes:
    """A request of /v1/completions as it goes over the wire."""
    body = json.dumps(
        {"model": "null", "prompt": prompt, "max_tokens": num_tokens, "stream": stream, "ignore_eos": True}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


@dataclass
class Reading:
    """What was read of one stream."""

    num_frames: int = 0
    tail: bytes = b""
    arrivals: list[float] | None = None
    """Of frames; None: not kept."""


def read_streams(
    port: int, streams: int, num_tokens: int, *, keep_arrivals: bool = False
) -> tuple[float, list[Reading]]:
    """Seconds until all streams have ended, and what came."""
    with selectors.DefaultSelector() as selector:
        readings = []
        for _ in range(streams):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(request(num_tokens))
            connection.setblocking(False)
            readings.append(Reading(arrivals=[] if keep_arrivals else None))
            selector.register(connection, selectors.EVENT_READ, readings[-1])
        started = time.perf_counter()
        num_open = streams
        while num_open:
            for key, _ in selector.select():
                reading: Reading = key.data
                data = key.fileobj.recv(_READ)  # type: ignore[union-attr]
                count = data.count(b"data: ")
                reading.num_frames += count
                if reading.arrivals is not None:
                    reading.arrivals += [time.perf_counter()] * count
                reading.tail = (reading.tail + data)[-32:]
                if not data or b"[DONE]" in reading.tail:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
                    num_open -= 1
        return time.perf_counter() - started, readings


def cpu_seconds(process: psutil.Process) -> float:
    """Of all threads."""
    times = process.cpu_times()
    return float(times.user + times.system)


def measure_throughput(streams: int, num_tokens: int, step_ms: float, repeats: int) -> str:
    """One line of the table."""
    rows = []
    with serving(step_ms, streams) as server:
        api, engine = server.child("api_process"), server.child("engine_process")
        read_streams(server.port, streams, 20)
        for _ in range(repeats):
            before = cpu_seconds(api), cpu_seconds(engine)
            seconds, readings = read_streams(server.port, streams, num_tokens)
            total = streams * num_tokens
            # A frame with the role or the usage is none; [DONE] is one.
            frames = sum(reading.num_frames - 1 for reading in readings)
            costs = (cpu_seconds(api) - before[0], cpu_seconds(engine) - before[1])
            rows.append((total / seconds, frames / total, *(1e6 * cost / total for cost in costs)))
        memory = api.memory_info().rss / 2**20
    rate, frames_, api_us, engine_us = (statistics.median(column) for column in zip(*rows, strict=True))
    return (
        f"| {step_ms:g} ms | {streams} x {num_tokens} | {rate:,.0f} | {frames_:.2f} | {api_us:.1f} | {engine_us:.1f} |"
        f" {memory:.0f} |"
    )


def measure_whole(connections: int, seconds: float) -> float:
    """Whole responses of 8 tokens per second, over kept connections."""
    with serving(0, connections) as server:
        wire = request(8, stream=False)
        counts = [0] * connections
        deadline = time.perf_counter() + seconds
        with selectors.DefaultSelector() as selector:
            for index in range(connections):
                connection = socket.create_connection(("127.0.0.1", server.port))
                connection.sendall(wire)
                selector.register(connection, selectors.EVENT_READ, index)
            while time.perf_counter() < deadline:
                for key, _ in selector.select(0.1):
                    # A response fits one read.
                    if key.fileobj.recv(_READ):  # type: ignore[union-attr]
                        counts[key.data] += 1
                        key.fileobj.sendall(wire)  # type: ignore[union-attr]
        return sum(counts) / seconds


def measure_first_token(streams: int, rounds: int) -> list[float]:
    """Milliseconds from the request to the first frame, of `streams` at once; the engine's first step takes no time."""
    found = []
    with serving(0, streams) as server:
        read_streams(server.port, streams, 2)
        for _ in range(rounds):
            for _, reading in _first_frames(server.port, streams):
                found.append(1e3 * reading)
    return found


def _first_frames(port: int, streams: int) -> list[tuple[int, float]]:
    with selectors.DefaultSelector() as selector:
        sent = []
        connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(streams)]
        for index, connection in enumerate(connections):
            sent.append(time.perf_counter())
            connection.sendall(request(2))
            selector.register(connection, selectors.EVENT_READ, index)
        found: dict[int, float] = {}
        while len(found) < streams:
            for key, _ in selector.select():
                if b"data: " in key.fileobj.recv(_READ):  # type: ignore[union-attr]
                    found.setdefault(key.data, time.perf_counter() - sent[key.data])
                    selector.unregister(key.fileobj)
        for connection in connections:
            connection.close()
        return sorted(found.items())


def measure_gaps(server: Server, streams: int, num_tokens: int) -> str:
    """Gaps between frames in ms, and the least stream's frames per second beside the mean."""
    _, readings = read_streams(server.port, streams, num_tokens, keep_arrivals=True)
    gaps = sorted(
        1e3 * (later - earlier)
        for reading in readings
        for earlier, later in zip(reading.arrivals or [], (reading.arrivals or [])[1:], strict=False)
    )
    rates = [num_tokens / ((reading.arrivals or [0])[-1] - (reading.arrivals or [0])[0]) for reading in readings]
    p50, p99 = gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.99)]
    return f"{p50:.1f} | {p99:.1f} | {gaps[-1]:.1f} | {min(rates) / statistics.mean(rates):.3f}"


def print_gaps(streams: int, num_tokens: int) -> None:
    """The table of gaps."""
    print("| 10 ms steps | gap p50, ms | p99 | longest | least / mean |\n| --- | --- | --- | --- | --- |")
    with serving(10, streams + 1) as server:
        read_streams(server.port, streams, 20)
        print(f"| alone | {measure_gaps(server, streams, num_tokens)} |")
        for label, disturb in (("100,000-token prompts", _send_long), ("/metrics all the time", _read_metrics)):
            stopped = threading.Event()
            times: list[float] = []
            thread = threading.Thread(target=disturb, args=(server.port, stopped, times))
            thread.start()
            print(f"| {label} | {measure_gaps(server, streams, num_tokens)} |")
            stopped.set()
            thread.join()
            worst = sorted(times)[int(len(times) * 0.99)] if times else float("nan")
            print(f"  ({len(times)} of them, p99 {1e3 * worst:.1f} ms)")


def _send_long(port: int, stopped: threading.Event, times: list[float]) -> None:
    wire = request(1, stream=False, prompt="x" * 100_000)
    while not stopped.is_set():
        started = time.perf_counter()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(wire)
            connection.recv(_READ)
        times.append(time.perf_counter() - started)


def _read_metrics(port: int, stopped: threading.Event, times: list[float]) -> None:
    while not stopped.is_set():
        for path in ("metrics", "health"):
            started = time.perf_counter()
            urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}").read()
            times.append(time.perf_counter() - started)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--steps", type=float, nargs="*", default=[10, 2, 0], help="milliseconds")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-stream", action="store_true")
    parser.add_argument("--first-token", action="store_true")
    parser.add_argument("--gaps", action="store_true")
    arguments = parser.parse_args()
    if arguments.no_stream:
        print(f"whole responses per second, 32 connections: {measure_whole(32, 10.0):,.0f}")
    if arguments.first_token:
        for streams in (1, arguments.streams):
            found = sorted(measure_first_token(streams, 300 if streams == 1 else 20))
            p50, p99 = found[len(found) // 2], found[int(len(found) * 0.99)]
            print(f"first token, {streams} at once: p50 {p50:.2f} ms, p99 {p99:.2f} ms")
    if arguments.gaps:
        print_gaps(arguments.streams, arguments.tokens)
    if arguments.steps:
        print(
            "| step | streams x tokens | tokens/s | frames per token | API process, us of CPU per token |"
            " engine, us | API process, MiB |\n| --- | --- | --- | --- | --- | --- | --- |"
        )
        for step_ms in arguments.steps:
            print(measure_throughput(arguments.streams, arguments.tokens, step_ms, arguments.repeats), flush=True)


if __name__ == "__main__":
    main()
