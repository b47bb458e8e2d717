"""Servers over an engine that computes nothing: Dovetail's and vLLM's, each as its users start it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from benchmarks.serving.null_engine import null_config, save_null_model

_MAX_MODEL_LEN = 1 << 17
_MAX_NUM_BATCHED_TOKENS = 8192
_FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Server:
    """A server that takes requests."""

    port: int
    api: psutil.Process
    """HTTP, tokenizing, text and frames."""
    engine: psutil.Process
    """The step loop."""
    supervisor: psutil.Process | None
    """What started both. None: the API process did."""


Start = Callable[[float, int], AbstractContextManager[Server]]
"""Starts a server, given the milliseconds between steps and the largest number of running requests."""


@contextmanager
def dovetail(step_ms: float, streams: int) -> Iterator[Server]:
    """`dovetail serve`, with telemetry as it is by default."""
    with tempfile.TemporaryDirectory() as folder:
        directory, port = Path(folder), _free_port()
        save_null_model(directory, _MAX_MODEL_LEN)
        config = null_config(
            directory, step_ms=step_ms, max_num_seqs=streams, max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS
        )
        config["server"] = {"port": port, "served_model_name": ["null"], "access_log": False, "log_level": "warning"}
        file = directory / "engine.json"
        file.write_text(json.dumps(config))
        with _running([sys.executable, "-m", "dovetail", "serve", str(file)], {}, port, "/ready") as supervisor:
            api, engine = _child(supervisor, "api_process"), _child(supervisor, "engine_process")
            yield Server(port, api, engine, supervisor)


@contextmanager
def _vllm(python: Path, step_ms: float, streams: int) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        directory, port = Path(folder), _free_port()
        save_null_model(directory, _MAX_MODEL_LEN)
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", folder, "--served-model-name", "null", "--dtype", "float32", "--port", str(port)]
        command += ["--max-num-seqs", str(streams), "--max-model-len", str(_MAX_MODEL_LEN)]
        command += ["--max-num-batched-tokens", str(_MAX_NUM_BATCHED_TOKENS), "--disable-uvicorn-access-log"]
        command += ["--distributed-executor-backend", "vllm_null.PacedTokens"]
        command += ["--additional-config", json.dumps({"step_ms": step_ms})]
        environment = {
            "PYTHONPATH": str(_FOLDER),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        with _running(command, environment, port, "/health") as api:
            # Its API server starts the engine's process, and names it so.
            yield Server(port, api, _child(api, "EngineCore"), None)


def vllm(python: Path) -> Start:
    """vLLM's server in this Python, with its Python front end and its default telemetry."""
    return partial(_vllm, python)


@contextmanager
def _running(
    command: Sequence[str], environment: Mapping[str, str], port: int, ready_path: str
) -> Iterator[psutil.Process]:
    """The process of a command, once it answers; it is ended afterwards."""
    with tempfile.NamedTemporaryFile() as log:
        started = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})
        with started as process:
            try:
                while not _answers(f"http://127.0.0.1:{port}{ready_path}"):
                    if process.poll() is not None:
                        raise SystemExit(f"{' '.join(command)} ended:\n{Path(log.name).read_text()[-4000:]}")
                    time.sleep(0.1)
                yield psutil.Process(process.pid)
            finally:
                process.terminate()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _child(parent: psutil.Process, name: str) -> psutil.Process:
    return next(child for child in parent.children() if any(name in part for part in child.cmdline()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
