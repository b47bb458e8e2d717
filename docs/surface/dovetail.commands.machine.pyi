from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NOISE_LIMIT = 0.1

@dataclass(frozen=True)
class Span:
    workload: str
    repetition: int
    seconds: float
    others: float | None
    stolen: float | None
    @property
    def taken(self) -> float: ...


class Watch:
    def __init__(self, workload: str, repetition: int): ...
    def stop(self) -> Span: ...

def noise_warning(spans: Sequence[Span]) -> str | None: ...
def describe_machine() -> dict[str, Any]: ...
