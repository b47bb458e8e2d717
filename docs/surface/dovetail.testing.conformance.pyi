from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from dovetail.registry.entries import Entry
from dovetail.registry.registry import Registry
from dovetail.testing._session import Result
from dovetail.testing.hints import Hint
from dovetail.testing.suite import Suite
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Report:
    plugin: str
    kind: str
    reference: str
    distribution: str | None
    contract: str
    suite: str
    attributes: Mapping[str, Any]
    versions: Mapping[str, str]
    machine: str
    time: str
    results: tuple[Result, ...]
    hints: tuple[Hint, ...] = ()
    def count(self, outcome: str) -> int: ...
    def save(self, path: Path) -> None: ...


@dataclass(frozen=True)
class Tested:
    entry: Entry
    plugin: Any
    suite: type[Suite]
    given: Mapping[str, Any]
    functions: Mapping[str, Any] = field(default_factory=dict)
    @property
    def attributes(self) -> dict[str, Any]: ...
    def report(self, results: Sequence[Result]) -> Report: ...

def load_tested(
    registry: Registry,
    entry: Entry,
    attributes: Mapping[str, Any],
    *,
    suite_name: str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Tested: ...
def main(arguments: Sequence[str] | None = None) -> int: ...
def print_report(report: Report) -> None: ...
