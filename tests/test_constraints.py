"""constraints.txt pins what the Makefile installs, so that a fresh `make test` is what was tested."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DEVELOPMENT = [Requirement(line) for line in [*PROJECT["dependencies"], *EXTRAS["dev"], *EXTRAS["docs"]]]


def pins() -> dict[str, Requirement]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in map(Requirement, lines)}


def test_all_that_development_installs_is_pinned_within_its_range() -> None:
    found = pins()
    for needed in DEVELOPMENT:
        pin = found.get(canonicalize_name(needed.name))
        assert pin is not None, f"{needed.name} has no line in constraints.txt"
        (version,) = pin.specifier
        assert version.operator == "=="
        assert needed.specifier.contains(version.version), f"{pin} is outside of {needed}"
