from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from dovetail.testing._session import Result
from dovetail.testing.capabilities import Capability
from dovetail.testing.suite import Suite
from typing import Any


@dataclass(frozen=True)
class Hint:
    capability: str
    tests: tuple[str, ...]

def lacking(results: Iterable[Result]) -> dict[Capability, list[str]]: ...
def try_capability(
    suite: type[Suite],
    attributes: Mapping[str, Any],
    capability: Capability,
    cases: Sequence[str],
) -> Hint | None: ...
def find_hints(
    command: Sequence[str],
    wanted: Mapping[Capability, Sequence[str]],
    timeout_s: float,
) -> list[Hint]: ...
def answer(suite: type[Suite], attributes: Mapping[str, Any]) -> None: ...
