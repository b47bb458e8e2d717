"""Reads plugins from the metadata of installed distributions, without importing plugin code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from dovetail.contracts.kinds import HOOKS_VERSION, KINDS
from dovetail.registry.distributions import headers

HOOKS_KIND = "hooks"
"""`Entry.kind` of entries in the hooks group, which is not a component kind."""

OWN_DISTRIBUTION = "dovetail"
"""Distribution whose plugins keep their plain names: another's of the same name is reached as "dist:name"."""

_GROUP = re.compile(r"dovetail\.(?P<kind>\w+)\.v(?P<major>\d+)")
_REFERENCE = re.compile(r"(?P<module>[\w.]+)\s*(:\s*(?P<attribute>[\w.]+))?\s*(\[.*\])?")


@dataclass(frozen=True)
class Entry:
    """What is known of a plugin without importing it."""

    kind: str
    name: str
    reference: str
    """"package.module:Class" or "/absolute/file.py:Class"."""
    major: int
    """Major version of the contract, from the entry-point group's name; the host's for direct references."""
    distribution: str | None = None
    """None for a direct reference."""
    version: str | None = None
    refusal: str | None = None
    """Why the metadata alone excludes the plugin, in one line; None: it may be loaded."""

    @property
    def qualified_name(self) -> str:
        """The name that is unique even where two distributions use the same one: "dist:name"."""
        return f"{self.distribution}:{self.name}" if self.distribution else self.name

    @property
    def is_own(self) -> bool:
        """Whether the plugin is of Dovetail's own distribution."""
        return self.distribution is not None and normalize_name(self.distribution) == OWN_DISTRIBUTION

    @property
    def origin(self) -> str:
        """The plugin's distribution with version, or the reference of a plugin without a distribution."""
        return f"{self.distribution} {self.version}" if self.distribution else self.reference

    @property
    def label(self) -> str:
        """How messages name this plugin."""
        return f"{self.kind} '{self.name}' ({self.origin})"


@dataclass(frozen=True)
class Problem:
    """Something wrong with an installation or a class, found without a run."""

    code: str
    """Which kind of problem, one of those that docs/doctor.md lists."""
    subject: str
    """The distribution or the plugin."""
    message: str
    """What is wrong and what to do, as a sentence."""


@dataclass(frozen=True)
class Scan:
    """The result of reading all metadata once."""

    entries: tuple[Entry, ...]
    """All entries, sorted by kind, name, distribution and major; with refused entries and those of hooks."""
    num_distributions: int
    """Number of distributions that were read, with or without plugins."""
    problems: tuple[Problem, ...]
    """Problems of the metadata: stale copies, unreadable files, unknown groups."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """The messages of `problems`."""
        return tuple(problem.message for problem in self.problems)

    @property
    def plugin_distributions(self) -> list[str]:
        """Sorted "name version" of the distributions with plugins."""
        return sorted({entry.origin for entry in self.entries})


def normalize_name(name: str) -> str:
    """A distribution's name in the canonical spelling of PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def kind_version(kind: str) -> str:
    """The contract version that this host speaks, for messages."""
    return str(KINDS[kind].version if kind in KINDS else HOOKS_VERSION)


def host_major(kind: str) -> int:
    """Major contract version that this host speaks for `kind` (hooks included)."""
    return KINDS[kind].version.major if kind in KINDS else HOOKS_VERSION.major


def version_refusal(kind: str, spoken: str, major: int, distribution: str | None) -> str:
    """One line that says which contract a plugin implements, which one this host speaks, and what to do."""
    plugin = distribution or "the plugin"
    here = f"speaks {kind} contract {spoken}, this Dovetail speaks {kind_version(kind)}"
    if major < host_major(kind):
        return f"{here}: upgrade {plugin} to a version for contract {host_major(kind)}, or install an older dovetail"
    return f"{here}: upgrade dovetail, or install a version of {plugin} written for contract {kind_version(kind)}"


def scan_distributions() -> Scan:
    """Reads the entry points of every distribution on sys.path.

    Where a distribution is there more than once, the first copy counts, since imports find its code; a later copy that
    differs is reported.
    """
    names: dict[str, None] = {}
    problems: list[Problem] = []
    num_distributions = 0
    for distribution in metadata.distributions():
        num_distributions += 1
        # Parsing METADATA for a name is slow, and few distributions bring plugins.
        if _has_plugins(distribution, problems):
            name = headers(distribution)["Name"]
            if name is None:
                place = str(distribution.locate_file(""))
                message = f"a distribution with plugins in {place} has no METADATA: reinstall it"
                problems.append(Problem("no-metadata", place, message))
                continue
            names[normalize_name(name)] = None
    entries: list[Entry] = []
    for name in sorted(names):
        copies = _copies(name)
        entries.extend(_read_entries(copies[0], problems))
        problems.extend(_stale_copies(copies))
    entries.sort(key=lambda entry: (entry.kind, entry.name, normalize_name(entry.distribution or ""), entry.major))
    return Scan(tuple(entries), num_distributions, tuple(problems))


def _has_plugins(distribution: metadata.Distribution, problems: list[Problem]) -> bool:
    try:
        text = distribution.read_text("entry_points.txt")
    except (OSError, UnicodeDecodeError) as error:
        place = str(distribution.locate_file(""))
        message = f"entry points in {place} cannot be read, none was used: {error}"
        problems.append(Problem("unreadable-entry-points", place, message))
        return False
    return text is not None and "dovetail." in text


def _copies(name: str) -> list[metadata.Distribution]:
    """Copies of a distribution on sys.path, in the order of imports."""
    copies: dict[tuple[str, str, str], metadata.Distribution] = {}
    for copy in metadata.distributions(name=name):
        # sys.path may name one directory twice, which is no second copy.
        key = (str(copy.locate_file("")), headers(copy)["Version"], copy.read_text("entry_points.txt") or "")
        copies.setdefault(key, copy)
    return list(copies.values())


def _stale_copies(copies: list[metadata.Distribution]) -> Iterator[Problem]:
    used = copies[0]
    for copy in copies[1:]:
        offered = {(point.group, point.name, point.value) for point in copy.entry_points}
        if copy.version == used.version and offered == {(p.group, p.name, p.value) for p in used.entry_points}:
            continue
        plugins = sorted(point.name for point in copy.entry_points if _GROUP.fullmatch(point.group))
        name = used.metadata["Name"]
        yield Problem(
            "stale-copy",
            name,
            f"{name} is on sys.path more than once: {used.version} in {used.locate_file('')} is used, "
            f"{copy.version} in {copy.locate_file('')} (with {', '.join(plugins) or 'no plugins'}) is shadowed: "
            f"remove one of them",
        )


def _read_entries(distribution: metadata.Distribution, problems: list[Problem]) -> list[Entry]:
    entries: list[Entry] = []
    about = headers(distribution)
    name, version = about["Name"], about["Version"]
    for point in distribution.entry_points:
        group = _GROUP.fullmatch(point.group)
        if group is None:
            continue
        kind, major = group["kind"], int(group["major"])
        if kind not in KINDS and kind != HOOKS_KIND:
            message = (
                f"{name} {version} offers '{point.name}' in the entry-point group '{point.group}', which this Dovetail "
                f"does not know: upgrade dovetail, or correct the group (kinds: {', '.join(KINDS)})"
            )
            problems.append(Problem("unknown-group", f"{name} {version}", message))
            continue
        entries.append(_create_entry(kind, major, point, name, version))
    served = {(entry.kind, entry.name) for entry in entries if entry.major == host_major(entry.kind)}
    # A distribution may serve several hosts from several groups; only what serves this one matters then.
    return [
        entry for entry in entries if entry.major == host_major(entry.kind) or (entry.kind, entry.name) not in served
    ]


def _create_entry(kind: str, major: int, point: metadata.EntryPoint, name: str, version: str) -> Entry:
    refusal = None
    reference = point.value.strip()
    match = _REFERENCE.fullmatch(reference)
    if match is None or (match["attribute"] is None and kind != HOOKS_KIND):
        refusal = f"the entry point's value {reference!r} is not of the form 'package.module:Class'"
    else:
        reference = f"{match['module']}:{match['attribute']}" if match["attribute"] else match["module"]
    if major != host_major(kind):
        refusal = version_refusal(kind, str(major), major, name)
    return Entry(kind, point.name, reference, major, name, version, refusal)
