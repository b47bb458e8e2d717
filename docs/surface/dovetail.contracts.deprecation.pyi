from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec('P')
R = TypeVar('R')
def deprecated(instead: str, *, goes_in: str) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def warn_deprecated(name: str, instead: str, *, goes_in: str, depth: int = 1) -> None: ...
