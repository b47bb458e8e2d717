"""Capabilities that a plugin could declare: the tests that were skipped for want of one, with the capability declared.

Capabilities are tried in a process of their own, since code that nobody declared to work may crash or hang. It is
started again for the capabilities that are left.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dovetail.registry.imports import import_environment
from dovetail.testing._session import Result, run_class
from dovetail.testing.capabilities import Capability
from dovetail.testing.suite import Suite

_MARK = "dovetail-hint "
"""Begins the lines of the process that are meant for this module; the plugin may print others."""


@dataclass(frozen=True)
class Hint:
    """A capability that is not declared, and whose tests pass."""

    capability: str
    tests: tuple[str, ...]
    """The cases that pass."""

    def __str__(self) -> str:
        return f"{self.capability} could be declared: {len(self.tests)} tests pass with it"


def lacking(results: Iterable[Result]) -> dict[Capability, list[str]]:
    """The skipped cases by the capability for whose lack they were skipped."""
    found: defaultdict[Capability, list[str]] = defaultdict(list)
    for result in results:
        if result.undeclared is not None:
            found[result.undeclared].append(result.name)
    return dict(found)


def try_capability(
    suite: type[Suite], attributes: Mapping[str, Any], capability: Capability, cases: Sequence[str]
) -> Hint | None:
    """Runs cases with the capability declared, in this process.

    Args:
        suite: Of the plugin's kind.
        attributes: Set on the suite, `plugin` among them.
        capability: That the plugin does not declare.
        cases: Tests that were skipped for it. What one of them asks besides is not tried.

    Returns:
        The hint, where none of them fails and one passes at least.
    """
    results = run_class(suite, {**attributes, "plugin": capability.added_to(attributes["plugin"])}, cases=cases)
    passed = tuple(result.name for result in results if result.outcome == "passed")
    return Hint(str(capability), passed) if passed and all(result.outcome != "failed" for result in results) else None


def find_hints(command: Sequence[str], wanted: Mapping[Capability, Sequence[str]], timeout_s: float) -> list[Hint]:
    """Tries capabilities in processes.

    Args:
        command: Starts a process that calls `answer` with what it reads from its standard input.
        wanted: Cases by capability.
        timeout_s: A process is ended after this time, and the next goes on behind the capability at which it hung.
    """
    hints: list[Hint] = []
    left = list(wanted.items())
    while left:
        asked = json.dumps([{"capability": asdict(capability), "cases": cases} for capability, cases in left])
        try:
            done = subprocess.run(
                command,
                input=asked,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                timeout=timeout_s,
                env=import_environment(),
            )
            output = done.stdout
        except subprocess.TimeoutExpired as expired:
            output = (expired.stdout or b"").decode(errors="replace")
        answers = [json.loads(line[len(_MARK) :]) for line in output.splitlines() if line.startswith(_MARK)]
        hints += [Hint(answer["capability"], tuple(answer["tests"])) for answer in answers if answer is not None]
        left = left[len(answers) + 1 :]
    return hints


def answer(suite: type[Suite], attributes: Mapping[str, Any]) -> None:
    """Tries what standard input names, and prints a line for each capability."""
    for asked in json.load(sys.stdin):
        hint = try_capability(suite, attributes, Capability(**asked["capability"]), asked["cases"])
        print(f"\n{_MARK}{json.dumps(None if hint is None else asdict(hint))}", flush=True)
