"""Processes that compute while an engine is measured, as on a laptop or in shared CI."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

# Hashing of so much releases Python's lock, so threads compute at once. The main thread waits for the end of its input:
# whatever ends the process that measures ends that as well.
_COMPUTE = """\
import hashlib, os, sys, threading
data = bytes(1 << 20)
def compute():
    while True:
        hashlib.sha256(data).digest()
for _ in range(int(sys.argv[1])):
    threading.Thread(target=compute, daemon=True).start()
sys.stdout.write("computing\\n")
sys.stdout.flush()
sys.stdin.read()
os._exit(0)
"""


@contextmanager
def neighbours(count: int, threads: int = 1) -> Iterator[list[int]]:
    """So many processes, each of which computes without a pause in so many threads, until the context is left: their
    ids. They end with this process, however it ends."""
    with ExitStack() as stack:
        started = [stack.enter_context(_neighbour(threads)) for _ in range(count)]
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        yield [process.pid for process in started]


@contextmanager
def _neighbour(threads: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-I", "-c", _COMPUTE, str(threads)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()
