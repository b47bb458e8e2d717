from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from dovetail.testing.kernel_checks import CheckedLaunches

__all__ = [
    "CompiledKernel",
    "CompiledLaunches",
    "compiled_launches",
]

@dataclass(frozen=True)
class CompiledKernel:
    name: str
    key: str
    shared_bytes: int
    num_warps: int
    cubin: bytes = field(repr=False, compare=False)


@dataclass
class CompiledLaunches:
    launches: list[CompiledKernel] = field(default_factory=list)
    compiled: int = 0
    found: int = 0
    checks: CheckedLaunches | None = None
    @property
    def kernels(self) -> set[CompiledKernel]: ...

@contextmanager
def compiled_launches(arch: int, *, execute: bool = True) -> Iterator[CompiledLaunches]: ...
