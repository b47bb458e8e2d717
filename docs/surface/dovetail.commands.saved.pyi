from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = [
    "differences",
    "read_saved",
    "shortened",
]
def differences(
    a: Any,
    b: Any,
    *,
    name: str = '',
    skip: frozenset[str] = frozenset(),
) -> Iterator[str]: ...
def read_saved(model: type[_Saved], path: Path, what: str, remedy: str) -> _Saved: ...
def shortened(value: Any) -> str: ...
