"""What is left of a suite whose process hung or died: which case that was, where, and how the others ended."""

from __future__ import annotations

import json
import re
import signal
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')
ORDER = ("passed", "failed", "quirk", "skipped", "hung", "died", "not run")


@dataclass(frozen=True)
class Call:
    """A call of a stack."""

    path: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}"


@dataclass(frozen=True)
class End:
    """How a process ended in the middle of a task."""

    task: str
    """The case, or "importing REFERENCE"."""
    outcome: str
    """"hung" or "died"."""
    message: str
    stack: str = ""
    """Of one that hung, as Python prints it, the innermost call first."""


def read_end(unfinished: str, code: int, timeout_s: float) -> End:
    """From what the process left in the file of its task, and its exit code."""
    task, _, stacks = unfinished.partition("\n")
    if not stacks:
        end = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return End(task, "died", f"{task}: the process ended {end}")
    # The main thread is the last.
    frames = [_FRAME.search(line) for line in stacks.rpartition("Thread 0x")[2].splitlines()]
    calls = [Call(frame[1], frame[2], frame[3]) for frame in frames if frame is not None]
    limit = f"{task} did not end in {timeout_s:g} s"
    if task.startswith("importing "):
        bodies = [call for call in calls if call.function == "<module>"]
        shown = [*bodies, *calls, Call("?", "?", "?")][0]
        return End(task, "hung", f"{limit}: it hangs in {shown} (--timeout sets the limit)")
    own = _calls_of(task, calls)
    stack = "\n".join(f"{call} in {call.function}" for call in own)
    return End(task, "hung", f"{limit}: it hangs in {_telling(own)} (--timeout sets the limit)", stack)


def _calls_of(task: str, calls: Sequence[Call]) -> Sequence[Call]:
    """Those that a test makes, itself last; all where it had not begun, or was over."""
    name = task.partition("[")[0]
    for number, call in enumerate(calls, 1):
        if call.function == name:
            return calls[:number]
    return calls


def _telling(calls: Sequence[Call]) -> str:
    """The innermost call outside of the suites and of Python's library, which is the plugin's more often than not, and
    where the test is; else the test alone."""
    if not calls:
        return "?"
    suites, library = Path(calls[-1].path).parent, Path(sysconfig.get_path("stdlib"))
    for call in calls:
        parents = Path(call.path).parents
        is_of_library = library in parents and "site-packages" not in call.path
        if suites not in parents and not is_of_library:
            return f"{call} (the test is at {calls[-1]})"
    return str(calls[-1])


def unfinished_report(journal: Path, end: End) -> dict[str, Any] | None:
    """The report that the suite would have written, with the case at which it ended and those that did not run. None
    where no case had begun."""
    lines = journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []
    if len(lines) < 2:
        return None
    report, collected, *results = (json.loads(line) for line in lines)
    done = {result["name"] for result in results} | {end.task}
    text = "\n\n".join(filter(None, (end.message, end.stack)))
    results.append(_result(end.task, end.outcome, text))
    results += [_result(name, "not run") for name in collected["cases"] if name not in done]
    return {**report, "results": results}


def _result(name: str, outcome: str, text: str = "") -> dict[str, Any]:
    return {"name": name, "outcome": outcome, "seconds": 0.0, "text": text, "undeclared": None}


def summary(report: Mapping[str, Any]) -> str:
    """What failed before the end, and the sums."""
    results: Sequence[Mapping[str, Any]] = report["results"]
    lines = [f"FAILED   {each['name']}\n{each['text']}\n" for each in results if each["outcome"] == "failed"]
    outcomes = [each["outcome"] for each in results]
    counts = ", ".join(f"{outcomes.count(name)} {name}" for name in ORDER if name in outcomes)
    return "\n".join(
        [*lines, f"{report['plugin']} ({report['kind']} {report['contract']}), {report['suite']}: {counts}"]
    )
