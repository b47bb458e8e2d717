"""Faults of prefill and decode on two servers behind `dovetail proxy`: an engine is killed or stopped in load.

    python benchmarks/faults_proxy.py [--times 10] [--only NAME ...]

Each time four streams are decoded when the fault comes, and another request comes right after it. Seconds are those
until that request is answered, or until the last stream has its error. After each fault both servers must be ready
again, with as many processes and files of shared memory as before. Wrong tokens are others than without a fault.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from fault_counts import HEADER, Count, traces
from leftovers import shared_memory

from dovetail.testing.chat_models import FAMILIES, save_chat_model

PREFILL_TIMEOUT_S = 2.0
"""Of the proxy."""
READY_S = 180.0
ENGINE, API = "dovetail.engine.remote.engine_process", "dovetail.plugins.server.api_process"
"""In the command lines of a server's processes."""
COMMON = {"temperature": 0, "ignore_eos": True}
STREAMED = [
    {**COMMON, "prompt": f"{number} times was computed what is not computed again. " * 3, "max_tokens": 300}
    for number in range(4)
]
AFTER = {**COMMON, "prompt": "This one came when something had failed, and was answered. " * 3, "max_tokens": 8}


@dataclass(frozen=True)
class Server:
    """One `dovetail serve`."""

    process: subprocess.Popen[bytes]
    url: str

    def find(self, module: str) -> int:
        """Process id of its engine, or of its API process."""
        children = psutil.Process(self.process.pid).children()
        (found,) = [one.pid for one in children if module in " ".join(one.cmdline())]
        return found

    def wait(self) -> None:
        """Until it serves. Raises `TimeoutError`."""
        give_up = time.monotonic() + READY_S
        while True:
            try:
                if httpx.get(f"{self.url}/ready", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            if self.process.poll() is not None or time.monotonic() > give_up:
                raise TimeoutError(f"{self.url} is not ready")
            time.sleep(0.1)


@dataclass(frozen=True)
class Site:
    """Two servers, and the proxy before them."""

    prefill: Server
    decode: Server
    proxy: str

    def num_traces(self) -> int:
        """Processes of all, and files of shared memory."""
        return len(psutil.Process().children(recursive=True)) + len(shared_memory())


class Stream(threading.Thread):
    """One request whose answer comes in parts."""

    def __init__(self, url: str, body: dict[str, Any]):
        super().__init__()
        self._url, self._body = url, {**body, "stream": True}
        self.begun = threading.Event()
        self.text, self.error, self.ended = "", "", 0.0
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=120) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        self._take(json.loads(line[6:]))
        except httpx.HTTPError as error:
            self.error = f"the stream broke off: {error!r}"
        self.begun.set()
        self.ended = time.monotonic()

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = event["error"]["message"]
            return
        self.text += "".join(choice["text"] for choice in event["choices"])
        self.begun.set()


class Bench:
    """What is asked of a site, and what should be answered."""

    def __init__(self, site: Site, times: int):
        self.site, self.times = site, times
        self.num_asked = 0
        answers = [self._complete(site.prefill.url, body) for body in (*STREAMED, AFTER)]
        *self.streamed, self.after = (answer.json()["choices"][0]["text"] for answer in answers)

    def hit(self, server: Server, module: str, sent: signal.Signals, spared: bool) -> Count:
        """A signal to a process of a server. `spared`: streams that are decoded go on."""
        count = Count()
        for _ in range(self.times):
            before, process = self.site.num_traces(), server.find(module)
            streams = [Stream(self.site.proxy, self._salted(body)) for body in STREAMED]
            for stream in streams:
                stream.begun.wait()
            os.kill(process, sent)
            hit = time.monotonic()
            answered = self._ask_after(count)
            for stream, expected in zip(streams, self.streamed, strict=True):
                stream.join()
                self._note(count, stream, expected, spared)
            count.seconds.append((answered if spared else max(stream.ended for stream in streams)) - hit)
            if sent is signal.SIGSTOP:
                os.kill(process, signal.SIGCONT)
            self._check_others(server, count)
            for one in (self.site.prefill, self.site.decode):
                one.wait()
            count.left += max(0, self.site.num_traces() - before)
            count.times += 1
        return count

    def _ask_after(self, count: Count) -> float:
        """A request that comes after the fault."""
        answer = self._complete(self.site.proxy, self._salted(AFTER))
        answered = time.monotonic()
        if answer.status_code == 200:
            count.done += 1
            count.wrong += answer.json()["choices"][0]["text"] != self.after
        else:
            self._note_error(count, answer.json()["error"]["message"])
        return answered

    def _note(self, count: Count, stream: Stream, expected: str, spared: bool) -> None:
        if not stream.error:
            count.done += 1
            count.wrong += stream.text != expected
            return
        count.wrong += not expected.startswith(stream.text)
        if spared:
            count.unnamed.append(stream.error)
        else:
            self._note_error(count, stream.error)

    def _note_error(self, count: Count, message: str) -> None:
        if "engine" in message or self.site.decode.url in message:
            if not count.named:
                count.notes.append(f"such as: {message}")
            count.named += 1
        else:
            count.unnamed.append(message)

    def _check_others(self, hit: Server, count: Count) -> None:
        """The other server must not have noticed."""
        other = self.site.prefill if hit is self.site.decode else self.site.decode
        answer = self._complete(other.url, self._salted(AFTER))
        if answer.status_code != 200 or answer.json()["choices"][0]["text"] != self.after:
            count.notes.append(f"the other server: {answer.status_code} {answer.text[:100]}")

    def _salted(self, body: dict[str, Any]) -> dict[str, Any]:
        """Whose blocks nobody has."""
        self.num_asked += 1
        return {**body, "cache_salt": str(self.num_asked)}

    def _complete(self, url: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{url}/v1/completions", json=body, timeout=120)


FAULTS = {
    "SIGKILL of the prefill engine": lambda bench: bench.hit(bench.site.prefill, ENGINE, signal.SIGKILL, spared=True),
    "SIGSTOP of the prefill engine": lambda bench: bench.hit(bench.site.prefill, ENGINE, signal.SIGSTOP, spared=True),
    "SIGKILL of the decode engine": lambda bench: bench.hit(bench.site.decode, ENGINE, signal.SIGKILL, spared=False),
    "SIGKILL of the decode server's API process": lambda bench: bench.hit(
        bench.site.decode, API, signal.SIGKILL, spared=False
    ),
}


@contextmanager
def started(folder: Path, name: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command of dovetail, whose words go to a file."""
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-m", "dovetail", *arguments], stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


@contextmanager
def open_site(folder: Path) -> Iterator[Site]:
    """Starts all, and waits until all answer."""
    save_chat_model(folder / "model", FAMILIES["hermes"])
    prefill_port, decode_port, proxy_port, peer_port = free_ports(4)
    connectors = {
        prefill_port: {"name": "peer", "role": "producer", "port": peer_port},
        decode_port: {"name": "peer", "role": "consumer", "peers": [f"127.0.0.1:{peer_port}"], "timeout_seconds": 0.5},
    }
    with ExitStack() as stack:
        servers = []
        for port, connector in connectors.items():
            config = {
                "model": {"path": str(folder / "model"), "dtype": "float32", "max_model_len": 1024},
                "cache": {"num_blocks": 1000, "block_size": 4},
                "executor": {"threads": 1},
                "kv_connector": connector,
                "server": {"port": port, "restart": {"max_restarts": 1000}},
            }
            file = folder / f"{connector['role']}.json"
            file.write_text(json.dumps(config))
            process = stack.enter_context(started(folder, str(connector["role"]), "serve", str(file)))
            servers.append(Server(process, f"http://127.0.0.1:{port}"))
        urls = ["--prefill", servers[0].url, "--decode", servers[1].url, "--port", str(proxy_port)]
        urls += ["--prefill-timeout", str(PREFILL_TIMEOUT_S)]
        stack.enter_context(started(folder, "proxy", "proxy", *urls))
        for server in servers:
            server.wait()
        yield Site(servers[0], servers[1], f"http://127.0.0.1:{proxy_port}")


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens at."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def main() -> None:
    """Runs the faults and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=[], choices=FAULTS)
    given = parser.parse_args()
    before = traces()
    with tempfile.TemporaryDirectory() as name:
        with open_site(Path(name)) as site:
            bench = Bench(site, given.times)
            print(HEADER)
            for fault, run in FAULTS.items():
                if not given.only or fault in given.only:
                    print(run(bench).row(fault), flush=True)
        warned = [line for line in (Path(name) / "proxy.log").read_text().splitlines() if " WARNING " in line]
        print(f"{len(warned)} warnings of the proxy; left once all ended: {len(traces() - before)}")


if __name__ == "__main__":
    main()
