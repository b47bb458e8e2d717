from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dovetail.registry.entries import Entry
from dovetail.registry.registry import Registry
from dovetail.testing._session import Result
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
    def count(self, outcome: str) -> int: ...
    def save(self, path: Path) -> None: ...

def check_plugin(registry: Registry, entry: Entry, attributes: Mapping[str, Any]) -> Report: ...
def main(arguments: Sequence[str] | None = None) -> int: ...
def print_report(report: Report) -> None: ...
