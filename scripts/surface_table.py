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

BASES = {
    "executor": ("dovetail.executors.processes",),
    "route": (
        "dovetail.plugins.server.bodies",
        "dovetail.plugins.server.fingerprint",
        "dovetail.plugins.server.live",
        "dovetail.plugins.server.sampling",
        "dovetail.plugins.server.sse",
        "dovetail.plugins.server.streams",
        "dovetail.plugins.server.structured",
        "dovetail.plugins.server.turns.blocks",
        "dovetail.plugins.server.turns.formats",
        "dovetail.plugins.server.turns.messages",
        "dovetail.plugins.server.turns.reading",
        "dovetail.plugins.server.turns.tools",
        "dovetail.plugins.server.turns.turn",
        "dovetail.plugins.server.usage",
    ),
    "dialect": (
        "dovetail.plugins.dialects.grammars",
        "dovetail.plugins.dialects.json_text",
        "dovetail.plugins.dialects.lark",
        "dovetail.plugins.dialects.parsing",
        "dovetail.plugins.dialects.shapes",
    ),
    "scheduler": ("dovetail.schedulers.batching", "dovetail.schedulers.ranked_queue"),
}
"""Modules outside the contracts that plugins of a kind may build on."""

NN = (
    "dovetail.nn",
    "dovetail.nn.decoder",
    "dovetail.nn.hf_config",
    "dovetail.nn.host_copies",
    "dovetail.nn.huge_pages",
    "dovetail.nn.kernels",
    "dovetail.nn.layer_plan",
    "dovetail.nn.loading",
    "dovetail.nn.mapped_pages",
    "dovetail.nn.moe",
    "dovetail.nn.native",
    "dovetail.nn.native.disk_cache",
    "dovetail.nn.packed_cache",
    "dovetail.nn.planning",
    "dovetail.nn.replay",
    "dovetail.nn.row_max",
    "dovetail.nn.skipped",
    "dovetail.nn.stages",
    "dovetail.nn.triton_check",
    "dovetail.nn.triton_launch",
    "dovetail.nn.waiting",
)

COMMANDS = (
    "dovetail.commands",
    "dovetail.commands.arrivals",
    "dovetail.commands.checks",
    "dovetail.commands.datasets",
    "dovetail.commands.http",
    "dovetail.commands.installed",
    "dovetail.commands.machine",
    "dovetail.commands.page",
    "dovetail.commands.progress",
    "dovetail.commands.sampling",
    "dovetail.commands.saved",
    "dovetail.commands.streaming",
    "dovetail.commands.student",
    "dovetail.commands.svg",
    "dovetail.commands.telemetry",
)


def surfaces(root: Path) -> tuple[Surface, ...]:
    """All surfaces of the tree at `root`, with the versions that it names."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    public_names = ("dovetail", "dovetail.config.schema:*Section")
    kinds_file = "core/contracts/kinds.py"
    return (
        Surface("dovetail", tuple(map(int, project["version"].split("."))), "pyproject.toml", public_names),
        _package(root, "nn", NN),
        _package(root, "commands", COMMANDS),
        _package(root, "testing", ("dovetail.testing", "dovetail.testing.*")),
        Surface("hooks", _numbers(str(HOOKS_VERSION)), kinds_file, ("dovetail.contracts.hooks",)),
        *(
            Surface(name, _numbers(str(kind.version)), kinds_file, BASES.get(name, ()), kind.base.replace(":", "."))
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
