"""Faults of pipeline stages: a worker is killed (SIGKILL) or stopped (SIGSTOP) while requests are in flight.

    OMP_NUM_THREADS=1 python benchmarks/faults_stages.py [--times 10] [--stages 2] [--tensor-parallel 1]

Each time an engine starts over worker processes, runs some steps of eight requests, and loses the worker of one rank,
another one each time. Counted is how often the error begins with this rank, its process and stage, how long it takes
until the error is there, and what is left behind: processes, files in /dev/shm and in the folder of temporary files. A
stopped worker is found by the deadline of a step (`executor.step_timeout_s`), which is part of its time.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from leftovers import shared_memory

from dovetail import LLMEngine, SamplingParams
from dovetail.contracts.errors import WorkerError
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

STEP_TIMEOUT_S = 5.0
MARKED = "dovetail.executors.processes.worker"
"""In the command lines of workers."""


@dataclass(frozen=True)
class Outcome:
    """Of one fault."""

    names_rank: bool
    seconds: float
    """From the signal until the error is raised."""
    left: tuple[str, ...]
    """Processes and files that were not there before."""
    message: str


def main() -> None:
    """Runs both faults and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10, help="faults of each kind")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tiny_model(folder / "model", tiny_config("llama", num_hidden_layers=4, max_position_embeddings=4096))
        (folder / "scratch").mkdir()
        tempfile.tempdir = str(folder / "scratch")  # where executors keep their files
        print("| fault | times | error names the rank | seconds: median | most | left behind |")
        print("| --- | --- | --- | --- | --- | --- |")
        for fault in (signal.SIGKILL, signal.SIGSTOP):
            number = given.stages * given.tensor_parallel
            outcomes = [
                one_fault(folder, fault, index % number, given.stages, given.tensor_parallel, random.Random(index))
                for index in range(given.times)
            ]
            print(row(fault.name, outcomes), flush=True)
            for outcome in outcomes:
                if outcome.left or not outcome.names_rank:
                    print(f"    {outcome}", flush=True)
            print(f"    such as: {outcomes[-1].message}", flush=True)


def row(fault: str, outcomes: Sequence[Outcome]) -> str:
    """A line of the table."""
    seconds = [outcome.seconds for outcome in outcomes]
    named = sum(outcome.names_rank for outcome in outcomes)
    left = sum(len(outcome.left) for outcome in outcomes)
    return f"| {fault} | {len(outcomes)} | {named} | {statistics.median(seconds):.2f} | {max(seconds):.2f} | {left} |"


def one_fault(
    folder: Path, fault: signal.Signals, rank: int, stages: int, tensor_parallel: int, rng: random.Random
) -> Outcome:
    """One engine, from its start until nothing of it should be left."""
    before = traces(folder)
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    engine = LLMEngine.from_config(
        model={"path": str(folder / "model"), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 4096},
        cache={"num_blocks": 2500},
        executor={
            "name": "multiproc",
            "pipeline_parallel": stages,
            "tensor_parallel": tensor_parallel,
            "threads": 1,
            "step_timeout_s": STEP_TIMEOUT_S,
        },
    )
    params = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
    for index in range(8):
        engine.add_request(str(index), [index + 3] * rng.randint(1, 40), params)
    for _ in range(rng.randint(3, 40)):
        engine.step()
    workers = [
        child
        for child in psutil.Process().children(recursive=True)
        if child.pid not in children and MARKED in " ".join(child.cmdline())
    ]
    workers.sort(key=lambda process: process.pid)  # ranks start in their order
    os.kill(workers[rank].pid, fault)
    signalled = time.monotonic()
    try:
        while True:
            engine.step()
    except WorkerError as error:
        seconds, message = time.monotonic() - signalled, str(error)
    engine.shutdown()
    del engine
    gc.collect()
    left = traces(folder) - before
    stage = f"stage {rank // tensor_parallel}, tensor rank {rank % tensor_parallel}"
    expected = rf"worker rank {rank} \(pid {workers[rank].pid}, {stage}\)"
    names = re.match(expected, message) is not None
    return Outcome(names, seconds, tuple(sorted(left)), message)


def traces(folder: Path) -> set[str]:
    """Descendants of this process, files of shared memory of this user, and the executors' files."""
    processes = {f"{child.pid} {' '.join(child.cmdline())}" for child in psutil.Process().children(recursive=True)}
    return processes | shared_memory() | {str(path) for path in (folder / "scratch").rglob("*")}


if __name__ == "__main__":
    main()
