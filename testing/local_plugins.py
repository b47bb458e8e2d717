"""Throw-away distributions on disk, for tests of discovery: what `pip install` leaves behind, without pip."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_distribution(
    site: Path,
    name: str,
    *,
    version: str = "1.0",
    entry_points: Mapping[str, Mapping[str, str]] | None = None,
    modules: Mapping[str, str] | None = None,
    requires: tuple[str, ...] = (),
) -> Path:
    """Writes a distribution into the directory `site`, which then must be put on sys.path.

    `entry_points` is group -> name -> reference, `modules` file name ("my_plugin.py") -> source, `requires` the
    values of Requires-Dist. Returns the path of the .dist-info directory.
    """
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    requirements = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requirements}")
    lines: list[str] = []
    for group, points in (entry_points or {}).items():
        lines.extend([f"[{group}]", *(f"{point} = {reference}" for point, reference in points.items()), ""])
    (info / "entry_points.txt").write_text("\n".join(lines))
    for file, source in (modules or {}).items():
        path = site / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    files = [*(modules or {}), *(f"{info.name}/{file}" for file in ("METADATA", "entry_points.txt", "RECORD"))]
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    return info
