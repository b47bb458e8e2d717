from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

@contextmanager
def leaves_alone(*handed: Any) -> Iterator[None]: ...
