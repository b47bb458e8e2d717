"""The registry: finds installed plugins, resolves a name to one of them, and loads its class."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.config.resolved import Component
from dovetail.contracts.errors import PluginError
from dovetail.contracts.kinds import KINDS
from dovetail.contracts.plugin import Plugin
from dovetail.registry.components import dump_options, validate_options
from dovetail.registry.entries import HOOKS_KIND, Entry, Scan, host_major, normalize_name, scan_distributions
from dovetail.registry.loading import is_file_reference, load_entry

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


class Registry:
    """Plugins by kind and name, from metadata; only `load` and `component` import a plugin.

    A name has one of these forms, tried in this order: ``name``, ``dist:name``, ``./file.py:Class`` (or an absolute
    path), ``package.module:Class``. A plain name that Dovetail's own distribution has is its; another distribution's
    plugin of the same name is ``dist:name``.
    """

    def __init__(self, scan: Scan):
        self.metadata = scan

    @classmethod
    def scan(cls) -> Registry:
        """Reads the metadata of all distributions on sys.path, once."""
        return cls(scan_distributions())

    def entries(self, kind: str) -> list[Entry]:
        """Installed plugins of `kind` that may be loaded, ordered by name and distribution."""
        _require_kind(kind)
        return [entry for entry in self.metadata.entries if entry.kind == kind and entry.refusal is None]

    def refused(self, kind: str) -> list[Entry]:
        """Installed plugins of `kind` that the metadata alone excludes; `Entry.refusal` says why."""
        _require_kind(kind)
        return [entry for entry in self.metadata.entries if entry.kind == kind and entry.refusal is not None]

    def hook_entries(self) -> list[Entry]:
        """Installed hook plugins, refused ones included."""
        return [entry for entry in self.metadata.entries if entry.kind == HOOKS_KIND]

    def name_of(self, entry: Entry) -> str:
        """The shortest name by which `find` finds an installed plugin: its plain name, or "dist:name" where the plain
        one is another plugin's or that of several."""
        alike = [other for other in self.entries(entry.kind) if other.name == entry.name]
        return entry.name if _preferred(alike) == [entry] or alike == [] else entry.qualified_name

    def find(self, kind: str, name: str, base_dir: Path | None = None) -> Entry:
        """Resolves `name` to an entry without importing it. Relative files are resolved against `base_dir`, or the
        current directory.

        Raises `PluginError` for a name that is unknown, ambiguous, or only of a plugin for another contract.
        """
        _require_kind(kind)
        matching = [e for e in self.metadata.entries if e.kind == kind and name in (e.name, _qualified(e, name))]
        usable = _preferred([entry for entry in matching if entry.refusal is None])
        if len(usable) == 1:
            return usable[0]
        if usable:
            choices = " or ".join(f"'{entry.qualified_name}'" for entry in usable)
            owners = ", ".join(entry.origin for entry in usable)
            raise PluginError(f"{kind} '{name}' is brought by several distributions ({owners}): write {choices}")
        if matching:
            raise PluginError(f"{matching[0].label}: {matching[0].refusal}")
        direct = direct_entry(kind, name, base_dir)
        if direct is None:
            raise PluginError(self._unknown(kind, name))
        return direct

    def load(self, kind: str, name: str, base_dir: Path | None = None) -> type[Plugin]:
        """Imports the plugin of `name`, and checks its class.

        Raises `PluginError`: its first line is the reason, the plugin's own traceback follows where there is one.
        """
        return self.load_entry(self.find(kind, name, base_dir))

    def load_entry(self, entry: Entry) -> type[Plugin]:
        """Imports the plugin of an entry, as `load` does."""
        try:
            return load_entry(entry)
        except PluginError as error:
            names = self._names_of_distribution(entry)
            if not names:
                raise
            # "left:right" was taken for a module and a class; say that it is no plugin of a distribution either.
            summary, _, details = str(error).partition("\n")
            left, _, right = entry.reference.partition(":")
            hint = f"nor has the distribution '{left}' a {entry.kind} '{right}' (it has: {', '.join(names)})"
            raise PluginError(f"{summary}; {hint}\n{details}".rstrip()) from error

    def component(
        self, kind: str, name: str, options: Mapping[str, Any] | None = None, base_dir: Path | None = None
    ) -> Component:
        """Returns the chosen plugin with its options, as a record that any process can load.

        Raises `PluginError` as `load` does, and `ConfigError` for options that the plugin does not take.
        """
        entry = self.find(kind, name, base_dir)
        plugin = self.load_entry(entry)
        validated = validate_options(plugin, entry.label, dict(options or {}))
        return Component(
            kind=kind,
            name=name,
            reference=entry.reference,
            distribution=entry.distribution,
            version=entry.version,
            options=dump_options(validated, entry.label),
        )

    def _names_of_distribution(self, entry: Entry) -> list[str]:
        """Plugins of a distribution that has the name of a direct reference's module."""
        if entry.distribution is not None or is_file_reference(entry.reference):
            return []
        owner = normalize_name(entry.reference.partition(":")[0])
        return [e.name for e in self.entries(entry.kind) if normalize_name(e.distribution or "") == owner]

    def _unknown(self, kind: str, name: str) -> str:
        known = [entry.name for entry in self.entries(kind)]
        bare = name.rpartition(":")[2]
        lines = [f"there is no {kind} '{name}'."]
        nearest = difflib.get_close_matches(bare, dict.fromkeys(known), n=3, cutoff=0.5)
        if nearest:
            lines[0] += f" Did you mean {' or '.join(repr(match) for match in nearest)}?"
        others = sorted({e.kind for e in self.metadata.entries if bare == e.name and e.kind not in (kind, HOOKS_KIND)})
        if others:
            lines.append(f"'{bare}' is the name of: {', '.join(others)}.")
        lines.append(f"Known: {', '.join(dict.fromkeys(known)) or 'none'}.")
        scanned = ", ".join(self.metadata.plugin_distributions) or "none"
        lines.append(f"Of {self.metadata.num_distributions} distributions scanned, these bring plugins: {scanned}.")
        lines.extend(f"Warning: {warning}" for warning in self.metadata.warnings)
        lines.append("A plugin of your own needs no packaging: write './file.py:Class' or 'package.module:Class'.")
        return "\n".join(lines)


def _require_kind(kind: str) -> None:
    if kind not in KINDS:
        raise PluginError(f"there is no plugin kind '{kind}'; kinds: {', '.join(KINDS)}")


def _preferred(entries: list[Entry]) -> list[Entry]:
    """Of plugins with one name those that the plain name may mean: Dovetail's own, or all."""
    return [entry for entry in entries if entry.is_own] or entries


def _qualified(entry: Entry, name: str) -> str | None:
    """Returns `name` where it means `entry` in the form "dist:name", whatever the distribution's spelling."""
    owner, _, bare = name.partition(":")
    matches = bare == entry.name and normalize_name(owner) == normalize_name(entry.distribution or "")
    return name if matches else None


def direct_entry(kind: str, name: str, base_dir: Path | None = None) -> Entry | None:
    """Returns the entry of "./file.py:Class" or "package.module:Class", None for any other form.

    Raises `PluginError` for a file that is not there, and for a file without a class.
    """
    if name.endswith((".py", ".py:")):
        raise PluginError(f"{kind} '{name}' is a file: name the class in it as well, '{name.rstrip(':')}:Class'")
    left, _, right = name.rpartition(":")
    if is_file_reference(name):
        path = ((base_dir or Path.cwd()) / Path(left).expanduser()).resolve()
        if not path.is_file():
            raise PluginError(f"{kind} '{name}': there is no file {path}")
        return Entry(kind, name, f"{path}:{right}", host_major(kind))
    if _DOTTED.fullmatch(left) and _DOTTED.fullmatch(right):
        return Entry(kind, name, name, host_major(kind))
    return None
