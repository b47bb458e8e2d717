"""Launches of Triton kernels compiled for a GPU that is not here, as they would be there: through the JIT's own path,
with the types, alignments, constants and options of the launch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from dovetail.testing.kernel_checks import CheckedLaunches, checked_kernels

__all__ = ["CompiledKernel", "CompiledLaunches", "compiled_launches"]


@dataclass(frozen=True)
class CompiledKernel:
    """What one launch needed."""

    name: str
    key: str
    """Of the kernel in Triton's cache: by the source, the types and alignments of arguments, constants, options and the
    GPU's kind."""
    shared_bytes: int
    """Per program."""
    num_warps: int
    cubin: bytes = field(repr=False, compare=False)


@dataclass
class CompiledLaunches:
    """What was launched so far."""

    launches: list[CompiledKernel] = field(default_factory=list)
    compiled: int = 0
    """Kernels that were not in the cache."""
    found: int = 0
    """Kernels that were read from the cache; each is looked for once per process."""
    checks: CheckedLaunches | None = None

    @property
    def kernels(self) -> set[CompiledKernel]:
        """Each once."""
        return set(self.launches)


class _Driver:
    """What Triton asks of a driver before it launches. For compute capability `arch`; nothing can be launched."""

    def __init__(self, arch: int):
        self._arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> _Driver:
        """Itself: kernels are remembered by device, and those of another such driver are not its own."""
        return self

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def compiled_launches(arch: int, *, execute: bool = True) -> Iterator[CompiledLaunches]:
    """While it is active, a launch over tensors on the CPU compiles its kernel for compute capability `arch` (80, 90,
    100) into Triton's cache (TRITON_CACHE_DIR), as a launch on such a GPU does, which finds it there if Triton is of
    the same version. Then it runs as `checked_kernels` has it; without `execute` it does not, and what it would write
    stays as it was.

    Raises what Triton raises; without TRITON_INTERPRET only. torch's memory on the CPU is aligned to 64 bytes and a
    GPU's to 512, which are the same to Triton. One thread at a time.
    """
    if knobs.runtime.interpret:
        raise RuntimeError("with TRITON_INTERPRET kernels have no compiled form; unset it")
    seen = CompiledLaunches()
    compile_launch = JITFunction.__dict__["run"]
    with ExitStack() as stack:
        if execute:
            seen.checks = stack.enter_context(checked_kernels())
        run_launch = JITFunction.__dict__["run"]

        def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
            compiled = compile_launch(kernel, *arguments, grid=grid, warmup=True, **named)
            if not warmup:
                metadata = compiled.metadata
                seen.launches.append(
                    CompiledKernel(
                        kernel.__name__, compiled.hash, metadata.shared, metadata.num_warps, compiled.asm["cubin"]
                    )
                )
                if execute:
                    run_launch(kernel, *arguments, grid=grid, warmup=False, **named)
            return compiled

        def listen(*, cache_hit: bool, **_: Any) -> None:
            seen.found += cache_hit
            seen.compiled += not cache_hit

        stack.enter_context(_replaced(JITFunction, "run", run))
        stack.enter_context(_replaced(knobs.compilation, "listener", listen))
        active = driver._active
        driver.set_active(_Driver(arch))
        stack.callback(setattr, driver, "_active", active)
        yield seen


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
