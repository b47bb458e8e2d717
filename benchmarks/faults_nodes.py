"""Faults of engines over several machines: a node dies in load, the engine dies, a link goes down while all lives on.

    python benchmarks/faults_nodes.py [--times 10] [--only NAME ...]    as root: it makes a network namespace

Two agents join an executor `joined` by 10.77.0.1; the second is in a network namespace, in place of another
machine. Steps are in flight when the fault comes. Counted is how often the error names the node, how long it takes
until the error is there (for the engine's death: until no worker is left), and what is left: workers, and files in
/dev/shm. Agents live on, but for the one that is killed, and join again each time. Where there is no fault (all cores
busy, or the second machine's processes halted for a while) each error is a false alarm.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from leftovers import shared_memory

from dovetail.contracts.errors import WorkerError
from dovetail.contracts.executor import ExecutorNeed
from dovetail.contracts.joining import write_key
from dovetail.executors.joined import JoinedExecutor, JoinedOptions
from dovetail.testing.toy_worker import ToySpec, toy_plan

SPACE, LISTEN = "dovetail-node", "10.77.0.1:29477"
INSIDE = ["ip", "netns", "exec", SPACE]
RANK = "dovetail.executors.nodes.rank"
"""In the command lines of workers."""
DRIVER = """
import sys
from pathlib import Path
from dovetail.contracts.executor import ExecutorNeed
from dovetail.executors.joined import JoinedExecutor, JoinedOptions
from dovetail.testing.toy_worker import ToySpec, toy_plan
options = JoinedOptions(listen=sys.argv[1], key_file=Path(sys.argv[2]), nodes=["a", "b"])
executor = JoinedExecutor(options, ToySpec(), ExecutorNeed("cpu", tensor_parallel=2))
executor.start()
print("started", flush=True)
step = 0
while True:
    executor.execute(toy_plan(step)).result()
    step += 1
"""


@dataclass(frozen=True)
class Outcome:
    """Of one fault."""

    is_named: bool
    seconds: float
    left: tuple[str, ...]
    message: str


class Nodes:
    """Two agents, the second in a network of its own."""

    def __init__(self, key_file: Path):
        self.key_file = key_file
        self.agents = [self._join("a", []), self._join("b", INSIDE)]

    def _join(self, name: str, inside: list[str]) -> subprocess.Popen[bytes]:
        command = [*inside, sys.executable, "-m", "dovetail.worker", "--join", LISTEN, "--name", name]
        return subprocess.Popen([*command, "--key-file", str(self.key_file)], stderr=subprocess.DEVNULL)

    def kill_second(self) -> None:
        """`ip netns exec` becomes the agent, so this is its process."""
        self.agents[1].kill()

    def replace_second(self) -> None:
        """Another agent joins in place of one that was killed."""
        if self.agents[1].poll() is not None:
            self.agents[1] = self._join("b", INSIDE)

    def close(self) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait()


@contextmanager
def network() -> Iterator[None]:
    """A namespace behind a pair of virtual links, 10.77.0.1 and 10.77.0.2."""
    commands = [
        f"ip netns add {SPACE}",
        f"ip link add dovetail0 type veth peer name dovetail1 netns {SPACE}",
        "ip address add 10.77.0.1/24 dev dovetail0",
        "ip link set dovetail0 up",
        f"ip -n {SPACE} address add 10.77.0.2/24 dev dovetail1",
        f"ip -n {SPACE} link set dovetail1 up",
        f"ip -n {SPACE} link set lo up",
    ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        yield
    finally:
        subprocess.run(["ip", "netns", "delete", SPACE], check=False)


def link(state: str) -> None:
    subprocess.run(["ip", "link", "set", "dovetail0", state], check=True)


def in_load(nodes: Nodes, fault: Callable[[], None], index: int) -> Outcome:
    """Steps run until the fault ends them."""
    before = shared_memory()
    options = JoinedOptions(listen=LISTEN, key_file=nodes.key_file, nodes=["a", "b"])
    executor = JoinedExecutor(options, ToySpec(), ExecutorNeed("cpu", tensor_parallel=2))
    executor.start()
    faulty = random.Random(index).randint(50, 500)
    try:
        for step in range(1_000_000):
            if step == faulty:
                fault()
                began = time.monotonic()
            executor.execute(toy_plan(step)).result()
    except WorkerError as error:
        seconds, message = time.monotonic() - began, str(error)
    executor.shutdown()
    return Outcome(re.search(r"node b \(10.77.0.2\) is gone", message) is not None, seconds, left(before), message)


def no_alarm(nodes: Nodes, seconds: float, disturb: Callable[[Nodes], AbstractContextManager[object]]) -> str:
    """Steps run for so long with what disturbs them; the error, empty where there is none."""
    options = JoinedOptions(listen=LISTEN, key_file=nodes.key_file, nodes=["a", "b"])
    executor = JoinedExecutor(options, ToySpec(), ExecutorNeed("cpu", tensor_parallel=2))
    executor.start()
    try:
        with disturb(nodes):
            until, step = time.monotonic() + seconds, 0
            while time.monotonic() < until:
                executor.execute(toy_plan(step)).result()
                step += 1
        return ""
    except WorkerError as error:
        return str(error)
    finally:
        executor.shutdown()


@contextmanager
def busy(nodes: Nodes) -> Iterator[None]:
    """Four processes compute."""
    burning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


@contextmanager
def halted(nodes: Nodes) -> Iterator[None]:
    """The second agent and its worker do nothing for three seconds, in which the first step waits for them."""
    agent = psutil.Process(nodes.agents[1].pid)
    processes = [agent, *agent.children()]
    for process in processes:
        process.suspend()

    def resume() -> None:
        for process in processes:
            process.resume()

    timer = threading.Timer(3.0, resume)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def driver_killed(nodes: Nodes) -> Outcome:
    before = shared_memory()
    command = [sys.executable, "-c", DRIVER, LISTEN, str(nodes.key_file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        driver.stdout.readline()
        found = workers()
        driver.kill()
        began = time.monotonic()
    psutil.wait_procs(found, timeout=20)
    return Outcome(len(found) == 2, time.monotonic() - began, left(before), "")


def workers() -> list[psutil.Process]:
    """Of both nodes."""
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if RANK in (process.info["cmdline"] or ())]


def left(before: set[str]) -> tuple[str, ...]:
    """What is there 15 seconds after the fault, or is gone before."""
    _, alive = psutil.wait_procs(workers(), timeout=15)
    return tuple([f"worker {process.pid}" for process in alive] + sorted(shared_memory() - before))


def report(fault: str, outcomes: list[Outcome]) -> None:
    seconds = [outcome.seconds for outcome in outcomes]
    named, remaining = sum(one.is_named for one in outcomes), sum(len(one.left) for one in outcomes)
    middle = statistics.median(seconds)
    print(f"| {fault} | {len(outcomes)} | {named} | {middle:.2f} | {max(seconds):.2f} | {remaining} |", flush=True)
    for outcome in outcomes:
        if outcome.left or not outcome.is_named:
            print(f"    {outcome}")


def agents_killed(nodes: Nodes, times: range) -> None:
    killed = []
    for index in times:
        nodes.replace_second()
        killed.append(in_load(nodes, nodes.kill_second, index))
    report("agent of a node killed (SIGKILL), its worker with it", killed)
    nodes.replace_second()


def links_down(nodes: Nodes, times: range) -> None:
    cut = []
    for index in times:
        cut.append(in_load(nodes, lambda: link("down"), index))
        link("up")
    report("link down, all processes live on", cut)


def drivers_killed(nodes: Nodes, times: range) -> None:
    report("engine killed (SIGKILL); seconds until no worker is left", [driver_killed(nodes) for _ in times])


def false_alarms(nodes: Nodes, times: range) -> None:
    found = {"60 s with four busy processes": [no_alarm(nodes, 60, busy)]}
    found[f"{len(times)} halts of 3 s"] = [no_alarm(nodes, 3.5, halted) for _ in times]
    for what, alarms in found.items():
        print(f"false alarms in {what}: {sum(map(bool, alarms))}", *filter(None, alarms), flush=True)


CASES = {"agent": agents_killed, "link": links_down, "engine": drivers_killed, "none": false_alarms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=[], choices=CASES)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, network():
        key_file = Path(folder) / "key"
        write_key(key_file)
        nodes = Nodes(key_file)
        try:
            print(
                "| fault | times | node named | seconds: median | most | left |\n| --- | --- | --- | --- | --- | --- |"
            )
            for case in given.only or CASES:
                CASES[case](nodes, range(given.times))
        finally:
            nodes.close()


if __name__ == "__main__":
    main()
