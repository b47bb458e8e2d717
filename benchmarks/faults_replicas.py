"""Faults of `dovetail serve --data-parallel-size 2` under streaming load: who is failed, who is moved, what is left.

    OMP_NUM_THREADS=1 python benchmarks/faults_replicas.py [--times 10] [--only NAME ...] [--router NAME]
                                                           [--add-to FILE]      counts of several runs together

Clients send one streamed request after another, twice as many as both replicas run at once, so that some of each
replica wait. Faults come one after another to one server, which starts replicas again; those that end the server have
one each. "moved" counts requests that went to another replica, by the server's log, "failed" those whose client was
given an error, "not named" those of them whose error does not name the replica, "wrong" those whose tokens are not the
tokens of the server before any fault (the first of them, where the stream broke off). "noticed" is the time from the
signal until the server's log names the replica (all: until /health is 503), or until nothing of the server runs. "left"
are processes and files in /dev/shm.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
from leftovers import shared_memory

from dovetail.testing.story_model import save_story_model

CLIENTS, RUNNING = 8, 2
"""RUNNING: requests that a replica runs at once."""
PROMPTS = [[3 + (7 * number + 5 * position) % 250 for position in range(12 + number)] for number in range(12)]
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Answer:
    """What a client got."""

    number: int
    """Of its prompt."""
    tokens: tuple[int, ...]
    status: int
    error: str


@dataclass
class Count:
    """Of one kind of fault."""

    times: int = 0
    answers: list[Answer] = field(default_factory=list)
    noticed: list[float] = field(default_factory=list)
    moved: int = 0
    shares: list[float] = field(default_factory=list)
    """Of the requests, that a slow replica got."""
    left: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, other: Count) -> None:
        """Those of another run."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Server:
    """Both replicas and the process that speaks HTTP."""

    def __init__(self, folder: Path, model: Path, *options: str):
        self.folder = folder
        self.log = folder / "serve.log"
        config = {
            "model": {"path": str(model), "dtype": "float32", "max_model_len": 256},
            "cache": {"block_size": 4, "num_blocks": 1000},
            "scheduler": {"max_num_seqs": RUNNING},
            "executor": {"threads": 1},
            "server": {
                "port": 0,
                "uds": str(folder / "http"),
                "data_parallel_size": 2,
                "access_log": False,
                "restart": {"max_restarts": 1000},
            },
        }
        (folder / "engine.json").write_text(json.dumps(config))
        command = [sys.executable, "-m", "dovetail", "serve", str(folder / "engine.json"), *options]
        environment = {**os.environ, "TMPDIR": str(folder)}
        with self.log.open("w") as output:
            self.process = subprocess.Popen(command, stderr=output, stdout=output, env=environment)

    def client(self) -> httpx.AsyncClient:
        """Of HTTP."""
        limits = httpx.Limits(max_connections=2 * CLIENTS, max_keepalive_connections=0)
        transport = httpx.AsyncHTTPTransport(uds=str(self.folder / "http"), limits=limits)
        return httpx.AsyncClient(transport=transport, base_url="http://server", timeout=TIMEOUT_S)

    def processes(self, what: str = "dovetail.") -> list[psutil.Process]:
        """Children that run this module; none once the first process has ended and was waited for."""
        if self.process.returncode is not None:
            return []
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if any(what in part for part in command_of(child))]

    def replica(self, index: int) -> psutil.Process:
        """The process of a replica."""
        (found,) = [p for p in self.processes("engine_process") if f"engine-{index}/" in " ".join(command_of(p))]
        return found

    def noted(self, pattern: str, since: float) -> list[float]:
        """When the server's log says so, in seconds since 1970; from `since` on."""
        lines = [line for line in self.log.read_text().splitlines() if re.search(pattern, line)]
        times = [datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp() for line in lines]
        return [moment for moment in times if moment >= since - 0.001]


def command_of(process: psutil.Process) -> list[str]:
    """Empty for one that has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


@asynccontextmanager
async def served(model: Path, count: Count, *options: str) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    """A server that takes requests; afterwards, what is left of it is counted."""
    before = shared_memory()
    with tempfile.TemporaryDirectory() as name:
        server = Server(Path(name), model, *options)
        try:
            async with server.client() as client:
                await until_ready(server, client)
                processes = server.processes()
                yield server, client
                processes += [one for one in server.processes() if one not in processes]
        finally:
            server.process.terminate()
            await asyncio.to_thread(server.process.wait)
        _, alive = await asyncio.to_thread(psutil.wait_procs, processes, 5)
        count.left += [f"process {process.pid}" for process in alive] + sorted(shared_memory() - before)
        for process in alive:
            process.kill()


async def until_ready(server: Server, client: httpx.AsyncClient) -> None:
    """Both replicas take requests."""
    while not (server.folder / "http").exists() or len(server.processes("api_process")) == 0:
        assert server.process.poll() is None, server.log.read_text()
        await asyncio.sleep(0.05)
    while True:
        try:
            page = (await client.get("/metrics")).text
        except httpx.TransportError:
            page = ""
        if all(f'engine="{index}"' in page for index in range(2)):
            return
        await asyncio.sleep(0.05)


async def ask(client: httpx.AsyncClient, number: int, request_id: str) -> Answer:
    """One streamed request."""
    body = {"prompt": PROMPTS[number], "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}
    tokens: list[int] = []
    try:
        more = {"return_token_ids": True, "request_id": request_id}
        async with client.stream("POST", "/v1/completions", json={**body, **more}) as response:
            if response.status_code != 200:
                return Answer(number, (), response.status_code, (await response.aread()).decode())
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return Answer(number, tuple(tokens), 200, "")
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        return Answer(number, tuple(tokens), 200, str(event["error"]["message"]))
                    tokens += event["choices"][0]["token_ids"] or ()
    except httpx.HTTPError as error:
        return Answer(number, tuple(tokens), 0, f"{type(error).__name__}: {error}")
    return Answer(number, tuple(tokens), 0, "the stream broke off")


class Load:
    """Clients that ask without end."""

    def __init__(self, client: httpx.AsyncClient):
        self.answers: list[Answer] = []
        self._client = client
        self._ends = False
        self._tasks = [asyncio.create_task(self._run(index)) for index in range(CLIENTS)]

    @classmethod
    async def begin(cls, client: httpx.AsyncClient) -> Load:
        """Under way for some requests."""
        load = cls(client)
        await until(lambda: len(load.answers) > CLIENTS)
        return load

    async def _run(self, index: int) -> None:
        for turn in range(1_000_000):
            if self._ends:
                return
            number = random.Random(f"{index} {turn}").randrange(len(PROMPTS))
            self.answers.append(await ask(self._client, number, f"{index}-{turn}-{time.monotonic_ns()}"))
            if self.answers[-1].error:
                await asyncio.sleep(0.1)  # as clients do which are refused

    async def end(self) -> list[Answer]:
        """All answers, once those under way are there."""
        self._ends = True
        await asyncio.gather(*self._tasks)
        return self.answers


Fault = Callable[[Server, httpx.AsyncClient, Count, int], Awaitable[None]]


async def killed(server: Server, client: httpx.AsyncClient, count: Count, index: int) -> None:
    """SIGKILL of one replica; the load goes on until it is back."""
    began = time.time()
    server.replica(index % 2).kill()
    await until(lambda: server.noted(f"replica {index % 2} is down", began))
    count.noticed.append(server.noted(f"replica {index % 2} is down", began)[0] - began)
    assert (await client.get("/health")).status_code == 200
    await until(lambda: server.noted(f"replica {index % 2} takes requests again", began))


async def stopped(server: Server, client: httpx.AsyncClient, count: Count, index: int) -> None:
    """SIGSTOP of one replica until it was noticed, then SIGCONT."""
    began = time.time()
    process = server.replica(index % 2)
    process.suspend()
    await until(lambda: server.noted(f"replica {index % 2} does not answer", began))
    count.noticed.append(server.noted(f"replica {index % 2} does not answer", began)[0] - began)
    assert (await client.get("/health")).status_code == 200
    await asyncio.sleep(0.5)
    process.resume()
    await until(lambda: server.noted(f"replica {index % 2} answers again", began))


async def all_down(server: Server, client: httpx.AsyncClient, count: Count, index: int) -> None:
    """SIGKILL of both replicas."""
    began = time.time()
    for replica in range(2):
        server.replica(replica).kill()
    while (health := await client.get("/health")).status_code == 200:
        await asyncio.sleep(0.01)
    count.noticed.append(time.time() - began)
    text = health.text
    if health.status_code != 503 or not all(f"replica {replica}: " in text for replica in range(2)):
        count.notes.append(f"/health: {health.status_code} {text}")
    while (await client.get("/ready")).status_code != 200:
        await asyncio.sleep(0.05)
    count.notes.append(f"ready after {time.time() - began:.1f} s")
    await until(lambda: all(server.noted(f"replica {replica} takes requests again", began) for replica in range(2)))


async def until(holds: Callable[[], Any]) -> None:
    """Raises `TimeoutError` where it does not come."""
    async with asyncio.timeout(TIMEOUT_S):
        while not holds():
            await asyncio.sleep(0.02)


async def on_one_server(model: Path, fault: Fault, times: int, router: str) -> Count:
    """A server that lives through all of them."""
    count = Count()
    async with served(model, count, "-o", f"server.router={router}") as (server, client):
        expected = await undisturbed(client)
        for index in range(times):
            began = time.time()
            load = await Load.begin(client)
            await fault(server, client, count, index)
            count.answers += await load.end()
            count.moved += len(server.noted("goes to another replica", began))
        check(count, expected)
    return count


async def undisturbed(client: httpx.AsyncClient) -> list[Answer]:
    """What each prompt gets before any fault."""
    return await asyncio.gather(*(ask(client, number, f"expected-{number}") for number in range(len(PROMPTS))))


def check(count: Count, expected: Sequence[Answer]) -> None:
    """Notes tokens that are not as expected; those of streams that broke off are the first of them."""
    for answer in count.answers:
        wanted = expected[answer.number].tokens
        wanted = wanted[: len(answer.tokens)] if answer.error else wanted
        if answer.tokens != wanted:
            count.notes.append(f"wrong: prompt {answer.number} {answer.tokens} for {wanted}")


async def front_killed(model: Path, times: int, signals: tuple[signal.Signals, ...]) -> Count:
    """The server's first process gets SIGKILL, after a replica got `signals`; seconds until nothing of it runs."""
    count = Count()
    for index in range(times):
        async with served(model, count) as (server, client):
            load = await Load.begin(client)
            processes = server.processes()
            for number in signals:
                server.replica(index % 2).send_signal(number)
            began = time.time()
            server.process.kill()
            _, alive = await asyncio.to_thread(psutil.wait_procs, processes, 40)
            count.noticed.append(time.time() - began)
            count.left += [f"process {process.pid}" for process in alive]
            for process in alive:
                process.kill()
            count.answers += await load.end()
            count.answers = [answer for answer in count.answers if not answer.error]
    return count


async def none_restarted(model: Path, times: int) -> Count:
    """SIGKILL of both replicas where none is started again: the server ends, with exit code 1."""
    count = Count()
    for _ in range(times):
        async with served(model, count, "-o", "server.restart.policy=never") as (server, client):
            load = await Load.begin(client)
            began = time.time()
            for replica in range(2):
                server.replica(replica).kill()
            code = await asyncio.to_thread(server.process.wait, 40)
            count.noticed.append(time.time() - began)
            if code != 1:
                count.notes.append(f"exit code {code}")
            count.answers += [answer for answer in await load.end() if not answer.error]
    return count


async def slow(model: Path, times: int, router: str) -> Count:
    """One replica runs for 20 ms of each 200: its share of the requests that began meanwhile."""
    count = Count()
    async with served(model, count, "-o", f"server.router={router}") as (server, client):
        expected = await undisturbed(client)
        for index in range(times):
            process, began = server.replica(index % 2), time.monotonic()
            before = await ended(client)
            load = Load(client)
            while time.monotonic() < began + 8:
                process.suspend()
                await asyncio.sleep(0.18)
                process.resume()
                await asyncio.sleep(0.02)
            count.answers += await load.end()
            done = [after - earlier for after, earlier in zip(await ended(client), before, strict=True)]
            count.shares.append(done[index % 2] / sum(done))
        check(count, expected)
    return count


async def ended(client: httpx.AsyncClient) -> list[float]:
    """Requests that each replica has ended since the server started."""
    found = [0.0, 0.0]
    for line in (await client.get("/metrics")).text.splitlines():
        if line.startswith("vllm:request_success_total{"):
            found[int(re.search(r'engine="(\d)"', line)[1])] += float(line.rpartition(" ")[2])  # type: ignore[index]
    return found


KINDS: dict[str, Callable[[Path, int, str], Awaitable[Count]]] = {
    "kill": lambda model, times, router: on_one_server(model, killed, times, router),
    "stop": lambda model, times, router: on_one_server(model, stopped, times, router),
    "slow": slow,
    "all": lambda model, times, router: on_one_server(model, all_down, times, router),
    "never": lambda model, times, router: none_restarted(model, times),
    "front": lambda model, times, router: front_killed(model, times, ()),
    "front-stopped": lambda model, times, router: front_killed(model, times, (signal.SIGSTOP,)),
}


def row(kind: str, count: Count) -> str:
    """A line of the table."""
    failed = [answer for answer in count.answers if answer.error]
    unnamed = [answer for answer in failed if "replica " not in answer.error]
    wrong = sum(note.startswith("wrong") for note in count.notes)
    noticed = f"{statistics.median(count.noticed):.2f} | {max(count.noticed):.2f}" if count.noticed else "- | -"
    done = len(count.answers) - len(failed)
    numbers = f"{count.times} | {done} | {count.moved} | {len(failed)} | {len(unnamed)} | {wrong}"
    return f"| {kind} | {numbers} | {noticed} | {len(count.left)} |"


def added(file: Path, kind: str, count: Count) -> Count:
    """With what earlier runs counted."""
    known: dict[str, Count] = pickle.loads(file.read_bytes()) if file.exists() else {}
    known.setdefault(kind, Count()).add(count)
    file.write_bytes(pickle.dumps(known))
    return known[kind]


def main() -> None:
    """Runs the faults and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=[], choices=KINDS)
    parser.add_argument("--router", default="round_robin")
    parser.add_argument("--model", type=Path, help="a folder for the model, kept for the next run")
    parser.add_argument("--add-to", type=Path, help="a file with the counts of earlier runs, which gets these too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = given.model or Path(name) / "model"
        if not model.exists():
            save_story_model(model)
        print("| fault | times | done | moved | failed | not named | wrong | noticed after s: median | most | left |")
        print("| --- " * 10 + "|", flush=True)
        for kind in given.only or KINDS:
            count = asyncio.run(KINDS[kind](model, given.times, given.router))
            count.times = given.times
            if given.add_to is not None:
                count = added(given.add_to, kind if kind != "slow" else f"slow, {given.router}", count)
            print(row(kind, count), flush=True)
            if count.shares:
                median, most = statistics.median(count.shares), max(count.shares)
                print(f"    share of the slow replica: median {median:.0%}, most {most:.0%}")
            failed = [answer.error for answer in count.answers if answer.error]
            for line in [*count.notes, *count.left, *failed[:3]]:
                print(f"    {line:.400}", flush=True)


if __name__ == "__main__":
    main()
