"""Examines what is installed, or the plugins that are named."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dovetail.commands.diagnosis.apart import UNKNOWN_KIND, examine_apart
from dovetail.commands.diagnosis.finding import Finding, finding, from_problem, in_order, once_per_place
from dovetail.commands.diagnosis.imports import examine_imports
from dovetail.commands.diagnosis.installation import examine_distribution, examine_names
from dovetail.commands.diagnosis.sources import examine_source
from dovetail.contracts.errors import PluginError
from dovetail.registry.entries import Entry, host_major, normalize_name
from dovetail.registry.loading import infer_kind, is_file_reference
from dovetail.registry.registry import Registry, direct_entry

TIMEOUT_S = 60.0
"""Time for the import and the examination of one plugin, in seconds."""

_NOT_LOADED = frozenset({"bad-entry-point", "other-contract", "module-gone", "missing-extra"})
"""What makes an import pointless."""


@dataclass(frozen=True)
class Diagnosis:
    """What was examined, and what was found."""

    entries: tuple[Entry, ...]
    findings: tuple[Finding, ...]
    """Errors first."""

    def of(self, entry: Entry) -> list[Finding]:
        """The findings about one plugin."""
        return [one for one in self.findings if entry.label in (one.subject, *one.others)]

    @property
    def errors(self) -> list[Finding]:
        """The findings that are errors."""
        return [one for one in self.findings if one.severity == "error"]


def diagnose(
    registry: Registry, names: Sequence[str] = (), *, loads: bool = False, timeout_s: float = TIMEOUT_S
) -> Diagnosis:
    """Examines metadata and sources of every installed plugin, or those of `names` ("name", "dist", "dist:name",
    "./file.py:Class", "package.module:Class"). Never raises for what a plugin does, and imports none in this process.

    Those that are named, and with `loads` all, are imported as well and their classes examined, in processes of their
    own that have `timeout_s` seconds for each.
    """
    entries, findings = _chosen(registry, names)
    owners = dict.fromkeys(entry.distribution for entry in entries if entry.distribution is not None)
    findings += [from_problem(each) for each in registry.metadata.problems if not names or _is_of(each.subject, owners)]
    findings += [one for one in examine_names(registry.metadata.entries) if not names or _concerns(one, entries)]
    for owner in owners:
        findings += examine_distribution(owner)
    imports = bool(names) or loads
    to_load = []
    for entry in entries:
        found = list(_before_import(entry, is_brief=_is_brief(entry, imports)))
        if imports:
            # The import shows it for certain.
            found = [one for one in found if one.code != "class-gone"]
        findings += found
        if imports and not any(one.code in _NOT_LOADED for one in found):
            to_load.append(entry)
    for given, entry, found in examine_apart(to_load, timeout_s):
        if entry != given:
            entries[entries.index(given)] = entry
            findings = [_relabelled(one, given.label, entry.label) for one in findings]
        findings += found
    # Now that the kind is known of each class that could be imported.
    for entry in entries:
        if entry.refusal is None and not _is_brief(entry, imports):
            findings += examine_imports(entry)
    return Diagnosis(tuple(entries), tuple(in_order(once_per_place(findings))))


def reference_entry(reference: str) -> Entry:
    """The entry of a direct reference whose kind is read from its class. Raises `PluginError`."""
    entry = _direct(reference)
    return replace(entry, kind=infer_kind(entry))


def _direct(reference: str) -> Entry:
    entry = direct_entry(UNKNOWN_KIND, reference)
    if entry is None:
        raise PluginError(f"'{reference}' is no reference: write './file.py:Class' or 'package.module:Class'")
    return entry


def _chosen(registry: Registry, names: Sequence[str]) -> tuple[list[Entry], list[Finding]]:
    if not names:
        return list(registry.metadata.entries), []
    entries: list[Entry] = []
    findings: list[Finding] = []
    for name in names:
        installed = [entry for entry in registry.metadata.entries if _names(name, entry)]
        try:
            entries += installed or [_direct(name)]
        except PluginError as error:
            is_reference = ":" in name or name.endswith(".py")
            message = str(error) if is_reference else f"there is no plugin '{name}'"
            remedy = _file_remedy(name) or _near_remedy(registry, name)
            findings.append(finding("unknown-name", name, message, remedy))
    return list(dict.fromkeys(entries)), findings


def _file_remedy(name: str) -> str | None:
    """What to do about an argument that means a file which gives no plugin; None for another one."""
    if name.endswith(".whl"):
        return "That is a wheel file: install it, then name its distribution."
    if name.endswith((".py", ".py:")):
        return f"Write '{name.rstrip(':')}:Class'."
    return "Correct the path: it counts from the working folder." if is_file_reference(name) else None


def _near_remedy(registry: Registry, name: str) -> str | None:
    """The names that are close to one that nothing has; None where there are none."""
    known = sorted({entry.name for entry in registry.metadata.entries})
    nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.7)
    return f"Did you mean {' or '.join(map(repr, nearest))}?" if nearest else None


def _names(name: str, entry: Entry) -> bool:
    """Whether an argument means an installed plugin: by its name, its qualified name, or its distribution's."""
    owner, _, bare = name.rpartition(":")
    distribution = normalize_name(entry.distribution or "")
    if not owner:
        return name == entry.name or normalize_name(name) == distribution
    return bare == entry.name and normalize_name(owner) == distribution


def _is_brief(entry: Entry, imports: bool) -> bool:
    """Whether the sources of a plugin are left out. Dovetail's own are examined before a release, and there are many of
    them."""
    return entry.is_own and not imports


def _before_import(entry: Entry, *, is_brief: bool) -> Iterator[Finding]:
    if entry.refusal is not None:
        code = "bad-entry-point" if entry.major == host_major(entry.kind) else "other-contract"
        yield finding(code, entry.label, f"{entry.label}: {entry.refusal}")
        return
    yield from examine_source(entry, is_brief=is_brief)


def _relabelled(one: Finding, old: str, new: str) -> Finding:
    """With the label that a plugin has once its kind is known."""
    if one.subject != old:
        return one
    return replace(one, subject=new, message=one.message.replace(old, new))


def _is_of(subject: str, owners: dict[str, None]) -> bool:
    return any(normalize_name(subject.partition(" ")[0]) == normalize_name(owner) for owner in owners)


def _concerns(one: Finding, entries: list[Entry]) -> bool:
    return any(one.subject in (entry.label, f"{entry.kind} '{entry.name}'") for entry in entries)
