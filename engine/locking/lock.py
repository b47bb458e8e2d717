"""What a run is made of: its parts with the code behind them, and its models."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from dovetail.config.resolved import Component, ResolvedConfig
from dovetail.contracts.kinds import HOOKS_VERSION
from dovetail.contracts.weights import ModelFiles, WeightFormat
from dovetail.registry.bootstrap import component_contents
from dovetail.registry.components import create_class
from dovetail.registry.contents import Contents, file_digest, installed_contents
from dovetail.registry.distributions import installed_version
from dovetail.registry.entries import OWN_DISTRIBUTION
from dovetail.registry.loading import is_file_reference
from dovetail.registry.registry import Registry

SMALL_BYTES = 32 << 20
"""Files of a model up to this size are hashed, larger ones only where that is asked for."""

_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton")


@dataclass(frozen=True)
class LockedCode:
    """The files of a distribution, or of a local file with those beside it that it imports."""

    version: str | None
    """None for code without a distribution."""
    sha256: str
    """Over all files (`Contents.digest`)."""
    files: Mapping[str, str]
    """Path -> SHA-256."""

    @classmethod
    def of(cls, contents: Contents, version: str | None) -> LockedCode:
        """As read from this machine."""
        return cls(version, contents.digest, contents.files)


@dataclass(frozen=True)
class LockedPart:
    """One chosen plugin, or an installed hook plugin."""

    kind: str
    name: str
    reference: str
    """Of a local file without its folder."""
    contract: str
    """The version that its class declares."""
    distribution: str | None = None
    local: LockedCode | None = None
    """The code of a part without a distribution."""


@dataclass(frozen=True)
class LockedModel:
    """A model, without its place on the disk."""

    config: str
    """SHA-256 of its config, as the weight format reads it, in canonical JSON."""
    tensors: str
    """SHA-256 of names, dtypes and shapes of its tensors."""
    files: Mapping[str, str]
    """File -> "sha256:..." , or "size:..." in bytes for a large one whose content was not asked for."""


@dataclass(frozen=True)
class Lock:
    """What a run is made of."""

    parts: Mapping[str, LockedPart]
    """By path in the config; hook plugins by "hooks." and their qualified name."""
    distributions: Mapping[str, LockedCode]
    """Those that bring the parts, and Dovetail itself."""
    models: Mapping[str, LockedModel]
    """By path in the config: "model", "speculative.drafters.NAME.model"."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The resolved config as plain data. Not compared with a machine: sizes follow from its memory."""
    informative: Mapping[str, str] = field(default_factory=dict)
    """Versions of Python and of libraries, and the platform: shown, and not part of a comparison's result."""


def take_lock(resolved: ResolvedConfig, registry: Registry | None = None, *, whole_weights: bool = False) -> Lock:
    """The lock of a run on this machine, which two calls give alike. `whole_weights`: the content of large files of
    models is hashed as well, which reads them.

    Raises `PluginError` for a part that cannot be loaded, `ModelError` for a model that cannot be read.
    """
    registry = registry if registry is not None else Registry.scan()
    chosen = {path: _part(component) for path, component in sorted(resolved.components_by_path().items())}
    parts = chosen | hook_parts(registry)
    owners = {part.distribution for part in parts.values() if part.distribution is not None} | {OWN_DISTRIBUTION}
    return Lock(
        parts=parts,
        distributions={owner: code_of(owner) for owner in sorted(owners)},
        models=lock_models(resolved, whole_weights=whole_weights),
        values=dict(resolved.values),
        informative=machine_facts(resolved.device_type),
    )


def hook_parts(registry: Registry) -> dict[str, LockedPart]:
    """The hook plugins that are installed, all of which every engine loads."""
    return {
        f"hooks.{entry.qualified_name}": LockedPart(
            entry.kind, entry.name, entry.reference, str(HOOKS_VERSION), entry.distribution
        )
        for entry in registry.hook_entries()
        if entry.refusal is None
    }


def code_of(distribution: str) -> LockedCode:
    """The files of an installed distribution; none where it is not installed."""
    return LockedCode.of(installed_contents(distribution), installed_version(distribution))


def not_as_installed(lock: Lock) -> list[str]:
    """A sentence for each distribution of a lock whose files on this machine are not what its installer recorded: the
    lock is of the files as they are, which no other machine gets from the same wheel."""
    lines = []
    for name in lock.distributions:
        contents = installed_contents(name)
        for what, paths in (("was edited", contents.edited), ("is gone", contents.missing)):
            if paths:
                more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
                lines.append(f"{name} is not as it was installed: {paths[0]}{more} {what}; install it again")
    return lines


def lock_models(resolved: ResolvedConfig, *, whole_weights: bool) -> dict[str, LockedModel]:
    """The models of a run by their paths in the config."""
    found = {"model": lock_model(resolved.weight_format, resolved.model.files, whole_weights=whole_weights)}
    for drafter in resolved.speculation.drafters.values() if resolved.speculation is not None else ():
        if drafter.model is not None:
            path = f"speculative.drafters.{drafter.name}.model"
            files = drafter.model.files
            found[path] = lock_model(drafter.model.weight_format, files, whole_weights=whole_weights)
    return found


def lock_model(weight_format: Component, files: ModelFiles, *, whole_weights: bool) -> LockedModel:
    """What identifies a model, read without its weights unless `whole_weights`."""
    plugin, options = create_class(weight_format)
    reader_of = cast(type[WeightFormat], plugin)(options)
    reader = reader_of.open(files)
    try:
        tensors = sorted((info.name, info.dtype, list(info.shape)) for info in reader.infos())
    finally:
        reader.close()
    return LockedModel(
        config=_canonical(reader_of.config(files)),
        tensors=_canonical(tensors),
        files={file.name: _identity(file, whole_weights=whole_weights) for file in _files_of(files.path)},
    )


def machine_facts(device_type: str) -> dict[str, str]:
    """Versions and the platform."""
    versions = {name: installed_version(name) for name in _LIBRARIES}
    facts = {
        "device": device_type,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "system": sys.platform,
    }
    return dict(sorted((facts | {name: text for name, text in versions.items() if text is not None}).items()))


def _part(component: Component) -> LockedPart:
    plugin, _ = create_class(component)
    major, minor = plugin.contract
    reference, name, local = component.reference, component.name, None
    if component.distribution is None:
        local = LockedCode.of(component_contents(component), None)
    if is_file_reference(reference):
        file, _, attribute = reference.rpartition(":")
        reference = name = f"{Path(file).name}:{attribute}"
    return LockedPart(component.kind, name, reference, f"{major}.{minor}", component.distribution, local)


def _identity(file: Path, *, whole_weights: bool) -> str:
    size = file.stat().st_size
    return f"sha256:{file_digest(file)}" if whole_weights or size <= SMALL_BYTES else f"size:{size}"


def _files_of(path: Path) -> Sequence[Path]:
    if path.is_file():
        return [path]
    return sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))


def _canonical(data: Any) -> str:
    text = json.dumps(data, sort_keys=True, default=str, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
