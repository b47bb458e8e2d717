"""The public surface, declared: which modules others may import, and which version each of them goes by.

`scripts/surface.py` records what these modules offer and guards it; docs/versioning.md says what the versions promise.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from dovetail.contracts.kinds import HOOKS_VERSION, KINDS

Version = tuple[int, ...]


@dataclass(frozen=True)
class Surface:
    """What goes by one version."""

    name: str
    """As CHANGELOG.md names it."""
    version: Version
    version_in: str
    """File of the repository in which the version is written."""
    modules: tuple[str, ...] = ()
    """Modules of this surface alone, "package.*" for all below a package; "module:pattern" for some of its names."""
    base: str = ""
    """Of a kind, the path of its abstract base class. The names of the contracts that it leads to are its, too."""


CONTRACTS = "dovetail.contracts.*"
"""Modules whose names belong to the kinds whose base classes lead to them; what no base leads to (errors) to all."""

HOST_ONLY = frozenset(
    {
        "dovetail.contracts.engine_client.EngineClient",
        "dovetail.contracts.engine_client.RequestStream",
        "dovetail.contracts.executor.PendingStep",
        "dovetail.contracts.executor.Worker",
        "dovetail.contracts.executor.WorkerSpec",
        "dovetail.contracts.hooks.RequestControl",
        "dovetail.contracts.model.Communicator",
        "dovetail.contracts.model.ModelContext",
        "dovetail.contracts.route.RouteHost",
        "dovetail.contracts.scheduler.KVMemory",
    }
)
"""Protocols that the host implements and plugins are handed: they may grow in a minor version."""

MODULES = "commands/diagnosis/public_modules.toml"
"""The public modules by surface. It is in the package, as `dovetail plugins doctor` reads it too."""


def surfaces(root: Path) -> tuple[Surface, ...]:
    """All surfaces of the tree at `root`, with the versions that it names."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = tomllib.loads((root / MODULES).read_text(encoding="utf-8"))
    modules = {name: tuple(patterns) for name, patterns in listed.items()}
    kinds_file = "core/contracts/kinds.py"
    return (
        Surface("dovetail", tuple(map(int, project["version"].split("."))), "pyproject.toml", modules["dovetail"]),
        _package(root, "nn", modules["dovetail.nn"]),
        _package(root, "commands", modules["dovetail.commands"]),
        _package(root, "testing", modules["dovetail.testing"]),
        Surface("hooks", _numbers(str(HOOKS_VERSION)), kinds_file, ("dovetail.contracts.hooks",)),
        *(
            Surface(name, _numbers(str(kind.version)), kinds_file, modules.get(name, ()), kind.base.replace(":", "."))
            for name, kind in KINDS.items()
        ),
    )


def _package(root: Path, folder: str, modules: tuple[str, ...]) -> Surface:
    """A package whose `__init__.py` has a `VERSION`; it is read, as the import would bring torch."""
    file = f"{folder}/__init__.py"
    written = re.search(r"^VERSION = ContractVersion\((\d+), (\d+)\)", (root / file).read_text(encoding="utf-8"), re.M)
    assert written is not None, f"{file} names no VERSION"
    return Surface(f"dovetail.{folder}", tuple(map(int, written.groups())), file, modules)


def _numbers(version: str) -> Version:
    return tuple(map(int, version.split(".")))
