"""A real server with the default model, and drafters that a request may name."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DRAFTERS = {
    "lookup": {"name": "ngram", "num_tokens": 4},
    "forced": {"name": "grammar", "num_tokens": 8},
}
"""By the label that a request gives as `speculation`."""


@contextmanager
def serving(
    *, log: Path, grammar: str = "llguidance", dialect: str = "plain", threads: int = 2, length: str = "adaptive"
) -> Iterator[str]:
    """The address of `dovetail serve`, which ends with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = {
        "model": {"max_model_len": 2048},
        "executor": {"threads": threads},
        "grammar": grammar,
        "dialect": dialect,
        "speculative": {
            "drafters": {label: {**each, "length": length} for label, each in DRAFTERS.items()},
            "default": None,
        },
        "server": {"port": port, "served_model_name": ["served"], "access_log": False, "log_level": "warning"},
    }
    with tempfile.TemporaryDirectory() as folder, log.open("ab") as lines:
        file = Path(folder) / "engine.json"
        file.write_text(json.dumps(config))
        command = [sys.executable, "-m", "dovetail", "serve", str(file)]
        with subprocess.Popen(command, stderr=lines, stdout=lines) as process:
            try:
                _wait_until_ready(port, process, log)
                yield f"http://127.0.0.1:{port}"
            finally:
                process.terminate()


def _wait_until_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    while process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready") as response:
                if response.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"the server ended; it says why in {log}")
