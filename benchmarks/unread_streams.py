"""Memory that streams take which nobody reads: python benchmarks/unread_streams.py

Requests of an `AsyncLLMEngine` over a small model that is made on the spot. Each stream is read once, and then not
until all requests are done. In a process of its own per kind of output, and once with every stream read at once.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

import psutil

from dovetail import LLM, AsyncLLMEngine, SamplingParams
from dovetail.testing.story_model import save_story_model

MIB = 1 << 20


async def run(engine: AsyncLLMEngine, params: SamplingParams, num_streams: int, is_read: bool) -> list[int]:
    """Outputs of each stream; unread ones are looked for only when the engine has ended all requests."""
    streams = [engine.generate([1, 2 + index], params) for index in range(num_streams)]
    await asyncio.gather(*(anext(stream) for stream in streams))

    async def rest(index: int) -> int:
        return 1 + len([0 async for _ in streams[index]])

    if not is_read:
        while (await engine.cache_statistics()).num_used_blocks:
            await asyncio.sleep(0.05)
        report("all done")
    return await asyncio.gather(*map(rest, range(num_streams)))


def report(moment: str) -> None:
    """Resident memory of this process, and what Python allocated since the last start of tracemalloc."""
    gc.collect()
    resident = psutil.Process().memory_info().rss / MIB
    traced = f", traced {tracemalloc.get_traced_memory()[0] / MIB:.2f} MiB" if tracemalloc.is_tracing() else ""
    print(f"  {moment}: resident {resident:.1f} MiB{traced}")


def measure(folder: str, kind: str, is_read: bool, num_streams: int, num_tokens: int, trace: bool) -> None:
    """One kind of output, in this process."""
    llm = LLM(
        model={"path": folder, "dtype": "float32", "max_model_len": 512},
        scheduler={"max_num_seqs": num_streams},
        cache={"num_blocks": num_streams * 33 + 1},
        executor={"threads": 1},
    )
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, output_kind=kind)
    with AsyncLLMEngine(llm.engine) as engine:
        asyncio.run(run(engine, params, num_streams, True))  # what the first run allocates
        if trace:
            tracemalloc.start()
        report("before")
        counts = asyncio.run(run(engine, params, num_streams, is_read))
        print(f"  outputs a stream: {min(counts)} to {max(counts)}")
        report("after")


def main() -> None:
    """All kinds, one process each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=488)
    parser.add_argument("--trace", action="store_true", help="count what Python allocates, too; slower")
    parser.add_argument("--model", help="a folder that another run wrote")
    parser.add_argument("--kind", choices=["delta", "cumulative"])
    parser.add_argument("--read", action="store_true")
    asked = parser.parse_args()
    if asked.kind is not None:
        measure(asked.model, asked.kind, asked.read, asked.streams, asked.tokens, asked.trace)
        return
    with tempfile.TemporaryDirectory() as folder:
        save_story_model(Path(folder))
        for kind in ("delta", "cumulative"):
            for flags in ([], ["--read"]):
                print(kind, *flags, flush=True)
                command = [sys.executable, *sys.argv, "--model", folder, "--kind", kind, *flags]
                subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
