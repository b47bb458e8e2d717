import torch
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = [
    "CheckedLaunches",
    "KernelFault",
    "checked_kernels",
]

@dataclass
class CheckedLaunches:
    launches: int = 0
    accesses: int = 0
    dumps: list[torch.Tensor] = field(default_factory=list)


class KernelFault(AssertionError):
    ...

@contextmanager
def checked_kernels() -> Iterator[CheckedLaunches]: ...
