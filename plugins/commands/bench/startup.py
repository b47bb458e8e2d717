"""`bench startup`: from the start of a process to its first token, in fresh processes."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from typing import Any

from dovetail.commands.installed import import_environment, module_command
from dovetail.commands.machine import Span, Watch, describe_machine
from dovetail.commands.progress import Progress
from dovetail.contracts.errors import ConfigError, DovetailError
from dovetail.plugins.commands.bench.result import Metric, Result, now
from dovetail.plugins.commands.bench.selection import EngineChoice, Procedure

_CHILD = "dovetail.plugins.commands.bench.startup_child"
_PHASES = {
    "total": "Start of the process to its first token, as its parent sees it.",
    "interpreter": "Start of the process to its first line of our code, and the way of the token back.",
    "import": "`from dovetail import LLM`, without torch.",
    "import torch": "`import torch`, which `LLM(...)` would import first.",
    "engine": "`LLM(...)`: config, plugins, weights, KV memory.",
    "first token": "`generate` of one token, with whatever is compiled or made on first use.",
}


def run_startup(choice: EngineChoice, procedure: Procedure) -> Result:
    """`repeats` processes, one at a time, after `warmup` ones that bring the files into memory."""
    times: dict[str, list[list[float]]] = {name: [] for name in _PHASES}
    spans: list[Span] = []
    report: dict[str, Any] = {}
    with Progress(procedure.warmup + procedure.repeats) as progress:
        for repetition in range(-procedure.warmup, procedure.repeats):
            progress.show("startup: warm-up" if repetition < 0 else f"startup: process {repetition + 1}")
            watch = Watch("startup", repetition)
            total, report = start_process(choice)
            span = watch.stop()
            if repetition >= 0:
                phases: dict[str, float] = report["phases"]
                found = {"total": total, "interpreter": total - sum(phases.values()), **phases}
                for name, seconds in found.items():
                    times[name].append([seconds])
                spans.append(span)
            progress.advance()
    return Result(
        kind="startup",
        date=now(),
        workloads={"startup": {"prompt_tokens": report["prompt_tokens"], "output_tokens": 1}},
        procedure={"repeats": procedure.repeats, "warmup": procedure.warmup, "page_cache": "warm after the first"},
        metrics={f"startup/{name}": Metric("s", "lower", "median", _PHASES[name], times[name]) for name in _PHASES},
        spans=spans,
        environment=describe_machine() | report["environment"],
        config=report["config"],
    )


def start_process(choice: EngineChoice) -> tuple[float, dict[str, Any]]:
    """Seconds to the first token of one fresh process, and what that reports. Raises its error."""
    total, report = None, None
    command = module_command(_CHILD, json.dumps(choice.keywords()))
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        started = time.monotonic()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=import_environment()
        ) as process:
            assert process.stdout is not None
            # Whatever else prints on standard output does not start with our mark.
            for line in process.stdout:
                if line == "dovetail-bench: first token\n":
                    total = time.monotonic() - started
                elif line.startswith("dovetail-bench: {"):
                    report = json.loads(line.partition(" ")[2])
        code = process.returncode
        errors.seek(0)
        message = errors.read().strip()
    if code == 0 and total is not None and report is not None:
        return total, report
    if code == 2:
        raise ConfigError(message.rpartition("error: ")[2])
    raise DovetailError(f"the process ended with code {code} before its first token:\n{message[-2000:]}")
