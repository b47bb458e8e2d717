"""Seconds and memory of a weight update, by each transport, beside reading the checkpoint again: one model, one run.

    python benchmarks/weight_updates.py --model DIR [--rounds 5] [--threads 1] [--bucket-mib 16]

DIR is a checkpoint in safetensors. Each arm is a process with an engine on the CPU whose weights are replaced by
those that it has; for `ipc` and `collective`, the trainer is a process of its own. The arms take turns in random order,
and the first round is not counted. An update lasts from start_weight_update to finish_weight_update, with the checksum
and the trainer's work (`disk`: it writes the files, and does not sync them); the connection is made before.
`checkpoint` is sleep(2) and wake_up(new_weights=True), from files that the system has in memory.

Memory is the peak of a process during an update, shared pages and the trainer's own weights included, and how much that
is above what it had before, which includes what earlier updates left with the allocator. Linux. The table has medians
(least to most).
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Named = tuple[str, torch.Tensor]
Peak = dict[str, float]
"""Of `watched`; empty where the trainer has no process of its own."""
MIB = 1 << 20


def main() -> None:
    """Runs the arms in turn and prints the table; with `--worker`, is one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bucket-mib", type=int, default=16)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is None:
        print_table(compare(options))
    else:
        work(options)


# --- the arms --------------------------------------------------------------------------------------------------------


def in_process(llm: Any, options: argparse.Namespace) -> Iterator[Peak]:
    """The trainer's tensors are in the engine's process."""
    weights = checkpoint_of(options.model)
    llm.init_weight_transfer_engine()
    while True:
        update(llm, [{"weights": weights}])
        yield {}


def disk(llm: Any, options: argparse.Namespace) -> Iterator[Peak]:
    """The trainer, in the engine's process, writes a file."""
    weights = checkpoint_of(options.model)
    llm.init_weight_transfer_engine()
    with tempfile.TemporaryDirectory() as folder:
        while True:
            save_file(weights, Path(folder, "model.safetensors"))
            update(llm, [{"path": folder}])
            yield {}


def ipc(llm: Any, options: argparse.Namespace) -> Iterator[Peak]:
    """Shared memory."""
    return from_trainer(llm, options, serve_ipc)


def collective(llm: Any, options: argparse.Namespace) -> Iterator[Peak]:
    """Broadcast over gloo."""
    return from_trainer(llm, options, serve_collective)


def checkpoint(llm: Any, options: argparse.Namespace) -> Iterator[Peak]:
    """No transport."""
    while True:
        llm.sleep(level=2)
        llm.wake_up(new_weights=True)
        yield {}


Arm = Callable[[Any, argparse.Namespace], Iterator[Peak]]
ARMS: dict[str, Arm] = {
    "in_process": in_process,
    "disk": disk,
    "ipc": ipc,
    "collective": collective,
    "checkpoint": checkpoint,
}


def work(options: argparse.Namespace) -> None:
    """One update for each line of the input."""
    from dovetail import LLM

    transport = None if options.worker == "checkpoint" else options.worker
    executor = {"name": "cpu", "threads": options.threads}
    llm = LLM(model=str(options.model), executor=executor, weight_transport=transport)
    updates = ARMS[options.worker](llm, options)
    for _ in sys.stdin:
        begin = time.perf_counter()
        with watched() as peak:
            trainer = next(updates)
        seconds = time.perf_counter() - begin
        print(json.dumps({"seconds": seconds, "engine": peak, "trainer": trainer}), flush=True)


def update(llm: Any, update_infos: Iterable[Any]) -> None:
    """One whole update."""
    llm.start_weight_update()
    for update_info in update_infos:
        llm.update_weights(update_info)
    llm.finish_weight_update()


def checkpoint_of(model: Path) -> dict[str, torch.Tensor]:
    """All tensors, in memory of the process's own."""
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(model.glob("*.safetensors")):
        weights.update({name: tensor.clone() for name, tensor in load_file(path).items()})
    return weights


# --- trainers --------------------------------------------------------------------------------------------------------


def from_trainer(llm: Any, options: argparse.Namespace, serve: Callable[..., None]) -> Iterator[Peak]:
    """The trainer is another process; yields its peak."""
    context = get_context("spawn")
    pipe, other = context.Pipe()
    context.Process(target=serve, args=(other, options.model, options.bucket_mib * MIB), daemon=True).start()
    llm.init_weight_transfer_engine(pipe.recv())
    while True:
        pipe.send("update")
        update(llm, iter(pipe.recv, None))
        yield pipe.recv()


def serve_ipc(pipe: Connection, model: Path, bucket_bytes: int) -> None:
    """A trainer's process."""
    from dovetail.rl.weight_sender import WeightSender

    with WeightSender() as sender:
        pipe.send(sender.init_info())
        serve(pipe, model, lambda weights: sender.send(weights, bucket_bytes))


def serve_collective(pipe: Connection, model: Path, bucket_bytes: int) -> None:
    """A trainer's process."""
    from dovetail.rl.collective_sender import CollectiveSender

    sender = CollectiveSender("127.0.0.1", world_size=2)
    pipe.send(sender.init_info())
    sender.connect()
    serve(pipe, model, lambda weights: sender.send(weights, bucket_bytes))


def serve(pipe: Connection, model: Path, send: Callable[[Iterable[Named]], Iterable[Any]]) -> None:
    """One update whenever the engine's process asks for it."""
    weights = checkpoint_of(model)
    while is_asked(pipe):
        with watched() as peak:
            for update_info in send(weights.items()):
                pipe.send(update_info)
            pipe.send(None)
        pipe.send(peak)


def is_asked(pipe: Connection) -> bool:
    """Whether the engine's process is there and wants an update."""
    try:
        return bool(pipe.recv() == "update")
    except EOFError:
        return False


@contextmanager
def watched() -> Iterator[Peak]:
    """Known at the end: `peak`, the most MiB in memory, and `more`, how much that is above what was there before."""
    found: Peak = {}
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    before = memory("VmRSS")
    yield found
    found["peak"] = memory("VmHWM")
    found["more"] = found["peak"] - before


def memory(field: str) -> float:
    """MiB of this process, by a name of /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


# --- the run ---------------------------------------------------------------------------------------------------------


def compare(options: argparse.Namespace) -> dict[str, list[Any]]:
    """Figures of each arm and round."""
    command = [sys.executable, __file__, *sys.argv[1:], "--worker"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    arms: dict[str, Any] = {name: subprocess.Popen([*command, name], **pipes) for name in ARMS}  # type: ignore[call-overload]
    found: dict[str, list[Any]] = {name: [] for name in arms}
    order = random.Random(0)
    for _ in range(1 + options.rounds):
        for name in order.sample(sorted(arms), len(arms)):
            arms[name].stdin.write("update\n")
            arms[name].stdin.flush()
            found[name].append(json.loads(arms[name].stdout.readline()))
    for process in arms.values():
        process.stdin.close()
        process.wait(60)
    return {name: rounds[1:] for name, rounds in found.items()}


def print_table(found: dict[str, list[Any]]) -> None:
    """In Markdown."""
    print("| | ms | engine's process: peak MiB | more than before | trainer's process: peak MiB | more than before |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, rounds in found.items():
        cells = [spread([1000 * one["seconds"] for one in rounds])]
        for process in ("engine", "trainer"):
            for key in ("peak", "more"):
                cells.append(spread([one[process][key] for one in rounds if one[process]]))
        print(f"| {name} | {' | '.join(cells)} |")


def spread(values: Sequence[float]) -> str:
    """Median, least and most."""
    return "" if not values else f"{median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


if __name__ == "__main__":
    main()
