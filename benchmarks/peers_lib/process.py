"""Starts worker processes and talks to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from .engines import Contender

WORKER = Path(__file__).resolve().parents[1] / "peers_worker.py"


class EngineFailed(Exception):
    """The worker process ended without an answer; the text is the last thing that it said."""


def end_workers_with_us() -> None:
    """Makes SIGTERM unwind this process as Ctrl-C does, so that a worker does not go on alone."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def _environment(contender: Contender, threads: int) -> dict[str, str]:
    """No variable of ours reaches a peer but the number of threads."""
    dropped = ("PYTHONPATH", "VIRTUAL_ENV", "LD_PRELOAD")
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    return kept | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"} | dict(contender.environment)


def _last_words(stderr: str, status: int | None) -> str:
    """The line that names the error: the last exception's, or the last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    named = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception", "Failed"))]
    said = (named or lines or [""])[-1]
    if status is not None and status < 0:
        return f"killed by signal {-status}: {said}"
    return said


def measure(contender: Contender, threads: int, workload: Mapping[str, Any], quiet_s: float, limit_s: float) -> Any:
    """What `workload.measure` found in a fresh process. Raises `EngineFailed`."""
    with tempfile.TemporaryDirectory() as directory:
        spec = _spec(contender, threads, "measure") | {"workload": workload, "quiet_s": quiet_s}
        file = Path(directory) / "spec.json"
        file.write_text(json.dumps(spec | {"started": time.time()}))
        try:
            completed = subprocess.run(
                [str(contender.python), str(WORKER), str(file)],
                capture_output=True,
                text=True,
                timeout=limit_s,
                env=_environment(contender, threads),
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired as error:
            raise EngineFailed(f"not done after {limit_s:.0f} s") from error
    if completed.returncode != 0 or not completed.stdout.strip():
        raise EngineFailed(_last_words(completed.stderr, completed.returncode))
    return json.loads(completed.stdout.splitlines()[-1])


def _spec(contender: Contender, threads: int, do: str) -> dict[str, Any]:
    return {
        "do": do,
        "engine": contender.engine,
        "model": contender.model,
        "threads": threads,
        "options": dict(contender.options),
    }


class ServingWorker:
    """A worker process that answers requests until it is closed. Use it in a `with`."""

    def __init__(self, contender: Contender, threads: int, directory: Path):
        """`directory` takes the specification and the log."""
        file = directory / "spec.json"
        file.write_text(json.dumps(_spec(contender, threads, "serve")))
        self._log = (directory / "stderr.txt").open("w+")
        self._process = subprocess.Popen(
            [str(contender.python), str(WORKER), str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=_environment(contender, threads),
        )

    def receive(self) -> Any:
        """The next answer; the first one comes unasked when the model is loaded. Raises `EngineFailed`."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        status = self._process.wait()
        self._log.seek(0)
        raise EngineFailed(_last_words(self._log.read(), status))

    def send(self, request: Mapping[str, Any]) -> None:
        """Asks; `receive` has the answer."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended; `receive` says why
            print(json.dumps(request), file=self._process.stdin, flush=True)

    def __enter__(self) -> ServingWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.kill()
        self._process.wait()
        self._log.close()
