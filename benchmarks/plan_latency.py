"""How long a step's plan takes to two workers and its result back, by the way that it travels.

    python benchmarks/plan_latency.py [--steps 2000] [--rounds 5]     ray is left out where it is not installed

The workers compute nothing. `multiproc` has pipes; `joined` has TCP connections, to agents on this machine; "Ray actor
calls" is what an engine would have that calls `execute` of two actors and waits for both. The variants take turns.
"""

from __future__ import annotations

import argparse
import importlib.util
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from dovetail.contracts.executor import ExecutorNeed
from dovetail.contracts.joining import write_key
from dovetail.executors.joined import JoinedExecutor, JoinedOptions
from dovetail.executors.multiproc import MultiprocExecutor
from dovetail.testing.toy_worker import ToySpec, toy_plan

NEED = ExecutorNeed("cpu", tensor_parallel=2)
Step = Callable[[int], Any]


@contextmanager
def multiproc() -> Iterator[Step]:
    executor = MultiprocExecutor(MultiprocExecutor.Options(), ToySpec(), NEED)
    executor.start()
    try:
        yield lambda number: executor.execute(toy_plan(number)).result()
    finally:
        executor.shutdown()


@contextmanager
def joined() -> Iterator[Step]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as agents:
        key = Path(folder) / "key"
        write_key(key)
        with socket.create_server(("127.0.0.1", 0)) as free:
            listen = f"127.0.0.1:{free.getsockname()[1]}"
        for name in "ab":
            command = [sys.executable, "-m", "dovetail.worker", "--join", listen, "--key-file", str(key)]
            agent = subprocess.Popen([*command, "--name", name], stderr=subprocess.DEVNULL)
            agents.callback(agent.kill)
        executor = JoinedExecutor(JoinedOptions(listen=listen, key_file=key, nodes=2), ToySpec(), NEED)
        executor.start()
        try:
            yield lambda number: executor.execute(toy_plan(number)).result()
        finally:
            executor.shutdown()


class Actor:
    """A worker that computes nothing."""

    def execute(self, plan: Any) -> int:
        """Returns something as small as a result."""
        return int(plan.step_id)


@contextmanager
def actor_calls() -> Iterator[Step]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        actors = [ray.remote(Actor).remote() for _ in range(NEED.num_ranks)]
        yield lambda number: ray.get([actor.execute.remote(toy_plan(number)) for actor in actors])
    finally:
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    ways = {"multiproc": multiproc, "joined": joined}
    if importlib.util.find_spec("ray") is not None:
        ways["Ray actor calls"] = actor_calls
    times: dict[str, list[float]] = {name: [] for name in ways}
    with ExitStack() as stack:
        steps = {name: stack.enter_context(way()) for name, way in ways.items()}
        for turn in range(arguments.rounds + 1):
            for name, step in steps.items():
                for number in range(arguments.steps):
                    before = time.perf_counter()
                    step(number)
                    if turn:  # the first warms up
                        times[name].append(time.perf_counter() - before)
    print(f"plan and result, two workers, {arguments.rounds} turns of {arguments.steps} steps")
    for name, found in times.items():
        found.sort()
        p99 = found[int(0.99 * len(found))]
        print(f"  {name:16} median {statistics.median(found) * 1e6:7.0f} us, p99 {p99 * 1e6:7.0f} us")


if __name__ == "__main__":
    main()
