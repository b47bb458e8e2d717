"""What faults of KV connectors cost: requests done, failed and wrong, and what is left behind.

python benchmarks/faults_connector.py [--times 10] [--only NAME ...]

Each fault happens so many times in one engine's life, and a request meets it each time. Wrong tokens are others than
those of an engine without a connector; seconds are those of the request. A peer is a prefill engine in a process of its
own, which is hit between prefill and decode. The full disk is a small tmpfs in a namespace (unshare -Urm), and is left
out where that cannot be. faults_proxy.py does the same with servers.
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
from pathlib import Path
from typing import Any

from fault_counts import HEADER, Count, traces

from dovetail import LLM, SamplingParams
from dovetail.contracts.kv_connector import BlockStore, StoreSetup
from dovetail.plugins.kv_connectors.host import Host, HostOptions, HostStore
from dovetail.plugins.kv_connectors.recent_records import RecentRecords
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

BLOCK_SIZE = 4
TIMEOUT_S = 0.5
"""Of a peer that does not answer."""
KEPT = 12
"""Blocks of each prompt that `ClaimsMore` finds again."""


class ForgetsHalf(HostStore):
    """Has every thirteenth record no more when it is asked."""

    num_found = 0

    def read(self, block_hash: bytes, transfer: Mapping[str, Any]) -> bytes | None:
        found = super().read(block_hash, transfer)
        self.num_found += found is not None
        return found if self.num_found % (KEPT + 1) else None


class ClaimsMore(Host):
    """Says that it has every block."""

    @classmethod
    def open_store(cls, options: HostOptions, setup: StoreSetup) -> BlockStore:
        return ForgetsHalf(RecentRecords(int(options.size_gib * 2**30)))

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

    def ask(self, llm: LLM, number: int, count: Count, transfer: Mapping[str, Any] | None = None) -> int:
        """One request, counted. Returns how many tokens of its prompt were found."""
        started = time.monotonic()
        try:
            tokens, found = self._run(llm, number, {"kv_transfer_params": transfer} if transfer else {})
        except Exception as error:
            count.unnamed.append(f"{type(error).__name__}: {error}")
            return 0
        count.seconds.append(time.monotonic() - started)
        count.times += 1
        count.done += 1
        count.wrong += tokens != self.expected[number]
        return found

    def _run(self, llm: LLM, number: int, extra: dict[str, Any]) -> tuple[list[int], int]:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, extra=extra)
        output = llm.generate([prompt(number)], params)[0]
        return list(output.outputs[0].token_ids), output.num_cached_tokens


def settle(llm: LLM) -> None:
    """What was computed is with the connector alone."""
    llm.engine.tokens.exchange.settle()
    llm.reset_prefix_cache()


def what_happened(llm: LLM) -> str:
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
        count.notes.append(f"{what_happened(llm)}, {warnings.count} warnings")
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
    """All files are changed behind the engine's back, before the same prompt comes again."""
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
        count.notes.append(what_happened(llm))
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
    """A connector that says it has all blocks of a prompt, and has none, and then the first twelve."""
    count, name = Count(), f"{Path(__file__).resolve()}:ClaimsMore"
    with engine(bench.model, kv_connector={"name": name}) as llm:
        for number in range(bench.times):
            found = []
            for _ in range(2):
                found.append(bench.ask(llm, number, count))
                settle(llm)
            if found != [0, KEPT * BLOCK_SIZE]:
                count.notes.append(f"prompt {number}: {found} tokens found")
        count.notes.append(what_happened(llm))
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
    """The prefill engine gets a signal between prefill and decode, of an engine that is connected with it."""
    count, port = Count(), free_port()
    transfer = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": port}
    options = {"peers": [f"127.0.0.1:{port}"], "timeout_seconds": TIMEOUT_S, "retry_seconds": 0}
    found: list[int] = []
    with engine(bench.model, kv_connector={"name": "peer", "role": "consumer", **options}) as llm, ExitStack() as stack:
        process: subprocess.Popen[str] | None = None
        for number in range(bench.times):
            if process is None or process.poll() is not None:
                process = stack.enter_context(producer(bench, port))
            # The connection with a producer before this one is broken, which one request finds.
            while not bench.ask(llm, number, Count(), transfer):
                llm.reset_prefix_cache()
            llm.reset_prefix_cache()
            if sent is not None:
                process.send_signal(sent)
            if sent is signal.SIGKILL:
                process.wait()
            found.append(bench.ask(llm, number, count, transfer))
            llm.reset_prefix_cache()
            if sent is signal.SIGSTOP:
                process.send_signal(signal.SIGCONT)
        count.notes.append(f"{what_happened(llm)}, {found.count(0)} prompts computed")
    return count


def run_producer(folder: Path, port: int, times: int) -> None:
    """Until its input ends."""
    with engine(folder / "model", kv_connector={"name": "peer", "role": "producer", "port": port}) as llm:
        for number in range(times):
            llm.generate([prompt(number)], SamplingParams(temperature=0, max_tokens=1))
        llm.engine.tokens.exchange.settle()
        print("ready", flush=True)
        sys.stdin.read()


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
    "SIGKILL of a peer": lambda bench: peer(bench, signal.SIGKILL),
    "SIGSTOP of a peer": lambda bench: peer(bench, signal.SIGSTOP),
}


def report(times: int, only: Sequence[str]) -> None:
    """Runs the faults and prints a table."""
    print(HEADER)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), times)
        for name, fault in FAULTS.items():
            if only and name not in only:
                continue
            before = traces()
            count = fault(bench)
            count.left += len(traces() - before)
            print(count.row(name), flush=True)


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=[], choices=FAULTS)
    parser.add_argument("--full-disk", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--producer", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.full_disk is not None:
        print(json.dumps(vars(full_disk_inside(Bench(given.full_disk, given.times)))))
    elif given.producer is not None:
        run_producer(Path(given.producer[1]), int(given.producer[0]), given.times)
    else:
        logging.disable(logging.WARNING)
        report(given.times, given.only)


if __name__ == "__main__":
    main()
