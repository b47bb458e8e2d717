from collections.abc import Collection, Sequence
from dovetail.contracts.quantization import LinearShape

def is_skipped(name: str, skip: Collection[str]) -> bool: ...
def against_skip(
    skip: Collection[str],
    shapes: Sequence[LinearShape],
    usual: Collection[str] = (),
) -> tuple[str, ...]: ...
