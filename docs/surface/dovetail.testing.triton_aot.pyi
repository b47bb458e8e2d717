from collections.abc import Mapping
from dataclasses import dataclass, field
from dovetail.nn.triton_launch import Launch
from typing import Any


@dataclass(frozen=True)
class KernelResources:
    registers: int
    shared_bytes: int
    stack_bytes: int
    cubin: bytes = field(default=b'', repr=False)

def compile_launch(launch: Launch, arch: int) -> KernelResources: ...
def compile_kernel(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    arch: int,
    **options: Any,
) -> KernelResources: ...
def split_types(
    signature: Mapping[str, str],
) -> tuple[dict[str, str], dict[tuple[int], list[list[Any]]]]: ...
def inspect_cubin(cubin: bytes, what: str) -> str: ...
