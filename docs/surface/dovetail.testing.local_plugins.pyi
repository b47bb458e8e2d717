from collections.abc import Mapping
from pathlib import Path

def write_distribution(
    site: Path,
    name: str,
    *,
    version: str = '1.0',
    entry_points: Mapping[str, Mapping[str, str]] | None = None,
    modules: Mapping[str, str] | None = None,
    requires: tuple[str, ...] = (),
) -> Path: ...
