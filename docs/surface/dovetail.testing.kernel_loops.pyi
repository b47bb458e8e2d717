from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Loop:
    instructions: int
    counts: Mapping[str, int]
    narrow_loads: int

def innermost_loops(cubin: bytes) -> list[Loop]: ...
def whole_kernel(cubin: bytes) -> Loop: ...
