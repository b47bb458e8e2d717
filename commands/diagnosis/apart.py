"""Examines classes in processes of their own, so that a plugin that hangs, exits or breaks its process costs itself."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

from dovetail.commands.diagnosis.finding import Finding, finding
from dovetail.registry.entries import Entry
from dovetail.registry.imports import import_environment, module_command

UNKNOWN_KIND = "plugin"
"""Kind of an entry whose class says of which kind it is."""

_START_S = 120.0
"""Time for the process itself to start, in seconds."""


def examine_apart(entries: Sequence[Entry], timeout_s: float) -> Iterator[tuple[Entry, Entry, list[Finding]]]:
    """Examines each entry's class, those of one distribution, file or module in one process. One that takes longer than
    `timeout_s` seconds, or ends its process, is reported as such; the others go on in a new one.

    Yields the entry that was given, the same with the kind that its class has (where its own is `UNKNOWN_KIND`), and
    what was found; in another order than given.
    """
    by_owner: dict[str, list[Entry]] = {}
    for entry in entries:
        by_owner.setdefault(entry.distribution or entry.reference.rpartition(":")[0], []).append(entry)
    for group in by_owner.values():
        left = group
        while left:
            answers = list(_examine(left, timeout_s))
            for given, (entry, found) in zip(left, answers, strict=False):
                yield given, entry, found
            left = left[len(answers) :]


def _examine(entries: Sequence[Entry], timeout_s: float) -> Iterator[tuple[Entry, list[Finding]]]:
    """Up to the first entry that does not come to its end."""
    command = module_command("dovetail.commands.diagnosis.examined")
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
            text=True,
            start_new_session=True,
            env=import_environment(),
        )
        assert process.stdin is not None
        assert process.stdout is not None
        lines = _lines(process.stdout)
        try:
            _write(process.stdin, [dataclasses.asdict(entry) for entry in entries])
            for entry in entries:
                answer, is_imported = _answer(lines, timeout_s)
                if answer is None:
                    yield entry, [_end(process, entry, printed)]
                    return
                if not answer:
                    code, what = ("hangs-in-check", "check") if is_imported else ("hangs-in-import", "import")
                    message = f"{entry.label} was not examined within {timeout_s:g} s: its {what} hangs"
                    yield entry, [finding(code, entry.label, message)]
                    return
                yield Entry(**answer["done"]), [Finding(**facts | {"others": ()}) for facts in answer["findings"]]
        finally:
            _kill(process)


def _answer(lines: queue.Queue[str | None], timeout_s: float) -> tuple[dict[str, Any] | None, bool]:
    """The answer about the next entry, and whether its import was done; an empty answer where it does not come in
    time, None where the process ended."""
    is_imported = False
    end = time.monotonic() + _START_S + timeout_s
    while True:
        try:
            line = lines.get(timeout=max(end - time.monotonic(), 0.0))
        except queue.Empty:
            return {}, is_imported
        answer: dict[str, Any] | None = json.loads(line) if line is not None else None
        if answer is None or "done" in answer:
            return answer, is_imported
        if "begun" in answer:
            end = time.monotonic() + timeout_s
        is_imported = "imported" in answer


def _end(process: subprocess.Popen[str], entry: Entry, printed: IO[str]) -> Finding:
    code = process.wait()
    printed.seek(0)
    last = printed.read().strip()[-2000:]
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    message = f"{entry.label} ended the process that examined it ({how})"
    return finding("ends-process", entry.label, f"{message}\n\n{last}".rstrip())


def _write(stream: IO[str], entries: list[dict[str, Any]]) -> None:
    with contextlib.suppress(BrokenPipeError):  # it ended already, which `_answer` notices
        stream.write(json.dumps(entries))
        stream.close()


def _lines(stream: IO[str]) -> queue.Queue[str | None]:
    """The lines of a stream as they come, and None at its end."""
    found: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in stream:
            found.put(line)
        found.put(None)

    threading.Thread(target=read, name="dovetail-examined", daemon=True).start()
    return found


def _kill(process: subprocess.Popen[str]) -> None:
    """Ends the process and what it started."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
