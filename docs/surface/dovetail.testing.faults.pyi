from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Fault",
    "Outcome",
    "check_fault",
    "run_test",
]

@dataclass(frozen=True)
class Fault:
    name: str
    plugin: Any
    test: str


@dataclass
class Outcome:
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    quirks: dict[str, str] = field(default_factory=dict)

def check_fault(fault: Fault, suite: type, **attributes: Any) -> None: ...
def run_test(suite: type, test: str, **attributes: Any) -> Outcome: ...
