import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dovetail.contracts.errors import DovetailError
from pathlib import Path

__all__ = [
    "FLAGS",
    "INCLUDE",
    "Kernel",
    "NativeError",
    "SelfTestError",
    "TEAM",
    "address_fields",
    "announce_compiling",
    "built",
    "find_compilers",
    "load",
    "reasons_against",
    "recorded_calls",
    "torch_alone",
]
FLAGS = ('-O3', '-march=native', '-std=gnu11', '-fPIC', '-shared', '-pthread', '-fno-math-errno', '-fno-trapping-math')
INCLUDE = Path(__file__).with_name('include')

class Kernel:
    def __init__(self, library: ctypes.CDLL, name: str, arguments: type[ctypes.Structure]): ...
    address: ...
    def __call__(self, *values: object) -> int: ...


class NativeError(DovetailError):
    ...


class SelfTestError(NativeError):
    ...

TEAM = Path(__file__).with_name('team.c')
def address_fields(arguments: type[ctypes.Structure]) -> tuple[str, ...]: ...
def announce_compiling() -> None: ...
def built(source: Path) -> Path: ...
def find_compilers() -> list[str]: ...
def load(source: Path) -> ctypes.CDLL: ...
def reasons_against(source: Path) -> list[str]: ...
@contextmanager
def recorded_calls() -> Iterator[list[tuple[Kernel, ctypes.Structure]]]: ...
@contextmanager
def torch_alone() -> Iterator[None]: ...
