"""Small C kernels that a plugin brings as source: compiled once with the machine's own compiler, kept on disk.

A plugin that has such kernels works without them, or refuses with the reason that `reasons_against` gives. Kernels are
plain C (C11 with OpenMP) without torch's headers, so that compiling takes seconds, and are called through ctypes with
addresses of tensors. They share torch's OpenMP threads: torch must be imported before `load` is called, so that its
runtime is the one that the dynamic linker finds.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dovetail.contracts.errors import DovetailError
from dovetail.nn.disk_cache import cache_directory

FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
_COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT = 300
_SELF_TEST = "self_test"


class NativeError(DovetailError):
    """Kernels could not be compiled or do not work on this machine."""


def reasons_against(source: Path) -> list[str]:
    """Why the kernels of `source` cannot be used here; empty where they can. Compiles them if that was not done yet."""
    try:
        built(source)
    except NativeError as error:
        return [str(error)]
    return []


class Kernel:
    """One C function `int name(const Arguments *)`, which returns 0 where it worked.

    All that a call depends on stands in its arguments, so that it can be recorded and repeated later
    (`dovetail.nn.replay`): what they point to must stay where it is, as weights, caches and the buffers of a step plan
    do, or be a tensor that the forward pass was given or made.
    """

    def __init__(self, library: ctypes.CDLL, name: str, arguments: type[ctypes.Structure]):
        function = library[name]
        function.argtypes, function.restype = (ctypes.c_void_p,), ctypes.c_int
        self._function = function
        self._arguments = arguments
        self.address = ctypes.cast(function, ctypes.c_void_p).value
        """Where the function is."""

    def __call__(self, *values: object) -> int:
        """Calls it with these values of the arguments' fields, in order."""
        arguments = self._arguments(*values)
        if _record.calls is not None:
            _record.calls.append((self, arguments))
        code: int = self._function(ctypes.addressof(arguments))
        return code


class _Record(threading.local):
    """The calls of this thread, while somebody records them."""

    calls: list[tuple[Kernel, ctypes.Structure]] | None = None


_record = _Record()


@contextmanager
def recorded_calls() -> Iterator[list[tuple[Kernel, ctypes.Structure]]]:
    """Every kernel that this thread calls meanwhile, with its arguments, in order."""
    calls: list[tuple[Kernel, ctypes.Structure]] = []
    _record.calls = calls
    try:
        yield calls
    finally:
        _record.calls = None


@functools.cache
def load(source: Path) -> ctypes.CDLL:
    """The compiled kernels of `source`. Raises `NativeError` with the compiler's message."""
    return ctypes.CDLL(str(built(source)))


def built(source: Path) -> Path:
    """The shared library of `source`, compiled if it is not there yet.

    The library's name is a hash of the sources beside it (every .c and .h file of its folder), the flags, the compiler
    and the processor, so a change of any of them compiles anew. If the source defines `int self_test(void)`, it is run
    in a process of its own before the library is taken into use, and must return 0. Safe against concurrent callers:
    each writes a file of its own and renames it.
    """
    compiler = _compiler()
    target = cache_directory() / "native" / f"{source.stem}-{_key(source, compiler)}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
            made = Path(folder) / target.name
            _run([compiler, *FLAGS, str(source), "-o", str(made), "-lm"], f"{compiler} cannot compile {source.name}")
            _self_test(source, made)
            made.replace(target)
    return target


def _self_test(source: Path, library: Path) -> None:
    """In a process of its own, since an instruction that the processor lacks kills it."""
    if f"int {_SELF_TEST}(void)" not in source.read_text():
        return
    program = f"import ctypes, sys; sys.exit(ctypes.CDLL({str(library)!r}).{_SELF_TEST}())"
    _run([_python(), "-c", program], f"the compiled kernels of {source.name} fail their own test on this processor")


def _python() -> str:
    import sys

    return sys.executable


def _run(command: Sequence[str], problem: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"{problem}: {error}") from error
    if done.returncode:
        detail = (done.stderr or done.stdout).strip().splitlines()
        raise NativeError(f"{problem} (exit {done.returncode}): {' | '.join(detail[:3])}")


def _compiler() -> str:
    for name in _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise NativeError(f"its kernels need a C compiler, and none of {', '.join(_COMPILERS)} is on the PATH")


def _key(source: Path, compiler: str) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for file in sorted({*source.parent.glob("*.c"), *source.parent.glob("*.h"), source}):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    binary = os.stat(os.path.realpath(compiler))
    digest.update(repr((FLAGS, compiler, binary.st_size, binary.st_mtime_ns, _processor())).encode())
    return digest.hexdigest()


@functools.cache
def _processor() -> tuple[str, ...]:
    """What -march=native depends on."""
    lines: list[str] = []
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "flags", "Features", "CPU part")):
                lines.append(line)
            elif not line:
                break
    except OSError:
        lines.append(platform.processor())
    return (platform.machine(), *lines)
