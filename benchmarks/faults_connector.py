"""What faults of KV connectors cost: requests done, failed and wrong, and what is left behind.

python benchmarks/faults_connector.py [--times 10] [--only NAME ...]

Each fault happens so many times in one engine's life, or in processes of its own; "wrong" counts requests whose tokens
are not those of an engine without a connector. Faults that need a full disk run in a namespace of their own with a
small tmpfs (unshare -Urm), and are left out where that cannot be.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from leftovers import shared_memory

from dovetail import LLM, SamplingParams
from dovetail.plugins.kv_connectors.host import Host
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@dataclass
class Count:
    """Of one fault."""

    done: int = 0
    failed: int = 0
    wrong: int = 0
    computed: int = 0
    """Requests that found nothing and were computed."""
    notes: list[str] = field(default_factory=list)


class ClaimsMore(Host):
    """Says that it has every block."""

    def lookup(self, block_hashes: Sequence[bytes], transfer: Mapping[str, Any]) -> int:
        return len(block_hashes)


def prompt(number: int) -> list[int]:
    """Twenty-five blocks and a token, of no other prompt."""
    return [(7 * i * i + 3 * i + 11 * number) % 128 for i in range(101)]


def engine(model: Path, **sections: Any) -> LLM:
    """A small engine in this process."""
    return LLM(
        model={"path": str(model), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 256},
        cache={"block_size": BLOCK_SIZE, "num_blocks": 400},
        executor={"threads": 1},
        **sections,
    )


class Bench:
    """The model, and what its tokens should be."""

    def __init__(self, folder: Path, times: int):
        self.folder, self.times = folder, times
        self.model = folder / "model"
        if not self.model.exists():
            save_tiny_model(self.model, tiny_config("llama", max_position_embeddings=512))
        with engine(self.model) as alone:
            self.expected = [self._run(alone, number, {})[0] for number in range(times)]

    def ask(self, llm: LLM, number: int, count: Count, transfer: Mapping[str, Any] | None = None) -> None:
        """One request, counted."""
        try:
            tokens, found = self._run(llm, number, {"kv_transfer_params": transfer} if transfer else {})
        except Exception as error:
            count.failed += 1
            count.notes.append(f"{type(error).__name__}: {error}")
            return
        count.done += 1
        count.wrong += tokens != self.expected[number]
        count.computed += not found

    def _run(self, llm: LLM, number: int, extra: dict[str, Any]) -> tuple[list[int], int]:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, extra=extra)
        output = llm.generate([prompt(number)], params)[0]
        return list(output.outputs[0].token_ids), output.num_cached_tokens


def settle(llm: LLM) -> None:
    """What was computed is with the connector alone."""
    llm.engine.tokens.exchange.settle()
    llm.reset_prefix_cache()


def statistics(llm: LLM) -> str:
    """Of the connector."""
    counts = llm.engine.tokens.exchange.statistics
    assert counts is not None
    return f"{counts.num_failures} refused, {counts.num_corrupt} corrupt, {counts.num_timeouts} timeouts"


def full_disk(bench: Bench) -> Count:
    """ENOSPC: a tmpfs that has space for a few blocks."""
    script = f"mount -t tmpfs -o size=64k none {bench.folder / 'small'} && exec {sys.executable} {__file__} --full-disk"
    (bench.folder / "small").mkdir()
    command = ["unshare", "-Urm", "sh", "-c", f"{script} {bench.folder} --times {bench.times}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if ended.returncode:
        return Count(notes=[f"left out: {ended.stderr.strip()[-300:]}"])
    return Count(**json.loads(ended.stdout.splitlines()[-1]))


def full_disk_inside(bench: Bench) -> Count:
    """In the namespace."""
    count, warnings, path = Count(), _Warnings(), bench.folder / "small"
    logging.getLogger().addHandler(warnings)
    with engine(bench.model, kv_connector={"name": "disk", "path": str(path), "retry_seconds": 0}) as llm:
        for number in range(bench.times):
            bench.ask(llm, number, count)
            settle(llm)
        count.notes.append(f"{statistics(llm)}, {warnings.count} warnings")
    parts = [one for one in path.rglob("*") if one.name.endswith(".part")]
    count.notes.append(f"{len(list(path.rglob('*.kv')))} blocks kept, {len(parts)} unfinished files left")
    return count


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


def broken_files(bench: Bench, change: Callable[[Path, list[Path]], object]) -> Count:
    """The files of the first block of each prompt are changed behind the engine's back."""
    count, path = Count(), Path(tempfile.mkdtemp(dir=bench.folder))
    with engine(bench.model, kv_connector={"name": "disk", "path": str(path)}) as llm:
        for number in range(bench.times):
            bench.ask(llm, number, Count())
            settle(llm)
            files = sorted(path.rglob("*.kv"))
            for file in files:
                change(file, files)
            bench.ask(llm, number, count)
            settle(llm)
        count.notes.append(statistics(llm))
    return count


def torn(file: Path, _: list[Path]) -> None:
    """Half of what was written."""
    os.truncate(file, file.stat().st_size // 2)


def garbage(file: Path, _: list[Path]) -> None:
    """Other bytes, as many."""
    file.write_bytes(os.urandom(file.stat().st_size))


def one_bit(file: Path, _: list[Path]) -> None:
    """The last one."""
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def foreign(file: Path, files: list[Path]) -> None:
    """Another block's content, whole."""
    other = files[files.index(file) - 1]
    file.write_bytes(other.read_bytes())


def no_file(file: Path, _: list[Path]) -> None:
    """A folder under a block's name."""
    if not file.is_dir():
        file.unlink()
        file.mkdir()


def claims_more(bench: Bench) -> Count:
    """A connector that says it has all blocks, and has none or half of them."""
    count = Count()
    with engine(bench.model, kv_connector={"name": f"{Path(__file__).resolve()}:ClaimsMore"}) as llm:
        for number in range(bench.times):
            bench.ask(llm, number, count)
            settle(llm)
        count.notes.append(statistics(llm))
    return count


@contextmanager
def producer(bench: Bench, port: int) -> Iterator[subprocess.Popen[str]]:
    """A prefill engine in a process of its own, which has computed all prompts."""
    command = [sys.executable, __file__, "--producer", str(port), str(bench.folder), "--times", str(bench.times)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        while (line := process.stdout.readline().strip()) != "ready":
            assert line or process.poll() is None, "the producer ended"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        assert process.stdin is not None
        process.stdin.close()


def peer(bench: Bench, sent: signal.Signals | None) -> Count:
    """The prefill engine gets a signal between prefill and decode."""
    count, port = Count(), free_port()
    transfer = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": port}
    options = {"peers": [f"127.0.0.1:{port}"], "timeout_seconds": 0.5, "retry_seconds": 0}
    slowest = 0.0
    with engine(bench.model, kv_connector={"name": "peer", "role": "consumer", **options}) as llm, ExitStack() as stack:
        process: subprocess.Popen[str] | None = None
        for number in range(bench.times):
            if process is None or process.poll() is not None:
                process = stack.enter_context(producer(bench, port))
            bench.ask(llm, number - 1, Count(), transfer)  # connected
            llm.reset_prefix_cache()
            if sent is not None:
                process.send_signal(sent)
            if sent is signal.SIGKILL:
                process.wait()
            started = time.monotonic()
            bench.ask(llm, number, count, transfer)
            slowest = max(slowest, time.monotonic() - started)
            llm.reset_prefix_cache()
            if sent is signal.SIGSTOP:
                process.send_signal(signal.SIGCONT)
        count.notes.append(f"{statistics(llm)}, slowest request {slowest:.2f} s")
    return count


def run_producer(folder: Path, port: int, times: int) -> None:
    """Until its input ends."""
    with engine(folder / "model", kv_connector={"name": "peer", "role": "producer", "port": port}) as llm:
        for number in range(times):
            llm.generate([prompt(number)], SamplingParams(temperature=0, max_tokens=1))
        llm.engine.tokens.exchange.settle()
        print("ready", flush=True)
        sys.stdin.read()


def decode_dies(bench: Bench) -> Count:
    """SIGKILL of a process that decodes what it took from a peer; another one takes the request."""
    count, port = Count(), free_port()
    command = [sys.executable, __file__, "--consumer", str(port), str(bench.folder), "--times", str(bench.times)]
    transfer = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": port}
    with producer(bench, port):
        consumer = {"name": "peer", "role": "consumer", "peers": [f"127.0.0.1:{port}"]}
        with engine(bench.model, kv_connector=consumer) as other:
            for number in range(bench.times):
                process = subprocess.Popen([*command, "--number", str(number)], stdout=subprocess.PIPE, text=True)
                assert process.stdout is not None
                while process.stdout.readline().strip() != "decoding":
                    assert process.poll() is None, "the consumer ended"
                process.kill()
                process.wait()
                process.stdout.close()
                bench.ask(other, number, count, transfer)
                other.reset_prefix_cache()
            count.notes.append(statistics(other))
    return count


def run_consumer(folder: Path, port: int, number: int) -> None:
    """Decodes until it is killed."""
    transfer = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": port}
    consumer = {"name": "peer", "role": "consumer", "peers": [f"127.0.0.1:{port}"]}
    with engine(folder / "model", kv_connector=consumer) as llm:
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, extra={"kv_transfer_params": transfer})
        llm.engine.add_request("it", {"prompt_token_ids": prompt(number)}, params)
        while not any(output.outputs and output.outputs[0].token_ids for output in llm.engine.step()):
            pass
        print("decoding", flush=True)
        sys.stdin.read()
        signal.pause()


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return min(int(tried.getsockname()[1]), 65000)


FAULTS: dict[str, Callable[[Bench], Count]] = {
    "disk full": full_disk,
    "torn files": lambda bench: broken_files(bench, torn),
    "files of other bytes": lambda bench: broken_files(bench, garbage),
    "one bit": lambda bench: broken_files(bench, one_bit),
    "files of other blocks": lambda bench: broken_files(bench, foreign),
    "folders in place of files": lambda bench: broken_files(bench, no_file),
    "claims more than it has": claims_more,
    "no fault: a peer": lambda bench: peer(bench, None),
    "SIGKILL of the prefill engine": lambda bench: peer(bench, signal.SIGKILL),
    "SIGSTOP of the prefill engine": lambda bench: peer(bench, signal.SIGSTOP),
    "SIGKILL of the decode engine": decode_dies,
}


def leftovers() -> tuple[set[str], set[int]]:
    """Shared memory, and processes under this one."""
    return shared_memory(), {one.pid for one in psutil.Process().children(recursive=True)}


def report(times: int, only: Sequence[str]) -> None:
    """Runs the faults and prints a table."""
    print("| fault | done | failed | wrong tokens | computed | left in /dev/shm, processes | |\n" + "| --- " * 7 + "|")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), times)
        for name, fault in FAULTS.items():
            if only and name not in only:
                continue
            shared, processes = leftovers()
            count = fault(bench)
            shared_after, processes_after = leftovers()
            left = f"{len(shared_after - shared)}, {len(processes_after - processes)}"
            numbers = f"{count.done} | {count.failed} | {count.wrong} | {count.computed} | {left}"
            print(f"| {name} | {numbers} | {'; '.join(count.notes)} |", flush=True)


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=[], choices=FAULTS)
    parser.add_argument("--full-disk", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--producer", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--consumer", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.full_disk is not None:
        print(json.dumps(vars(full_disk_inside(Bench(given.full_disk, given.times)))))
    elif given.producer is not None:
        run_producer(Path(given.producer[1]), int(given.producer[0]), given.times)
    elif given.consumer is not None:
        run_consumer(Path(given.consumer[1]), int(given.consumer[0]), given.number)
    else:
        logging.disable(logging.WARNING)
        report(given.times, given.only)


if __name__ == "__main__":
    main()
