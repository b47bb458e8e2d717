"""What metadata and files of the distributions that bring plugins get wrong. Nothing is imported."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import parse_tag, sys_tags

from dovetail.commands.diagnosis.finding import Finding, finding
from dovetail.registry.contents import distribution_contents
from dovetail.registry.entries import HOOKS_KIND, Entry, normalize_name

_SHOWN = 5


def examine_distribution(name: str) -> Iterator[Finding]:
    """Findings about the files and the requirements of one distribution."""
    distribution = metadata.distribution(name)
    subject = f"{distribution.metadata['Name']} {distribution.version}"
    contents = distribution_contents(name)
    if contents.missing:
        yield finding("missing-files", subject, f"{_some(contents.missing)} of {subject}: recorded, and not there")
    if contents.edited:
        yield finding("edited-files", subject, f"{_some(contents.edited)} of {subject}: not as it was installed")
    yield from _other_python(distribution, subject)
    yield from _missing_dependencies(distribution, subject)


def examine_names(entries: Iterable[Entry]) -> Iterator[Finding]:
    """Findings about names that several distributions bring."""
    by_name: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.refusal is None and entry.kind != HOOKS_KIND:
            by_name[entry.kind, entry.name].append(entry)
    for (kind, name), alike in by_name.items():
        own = [entry for entry in alike if entry.is_own]
        others = [entry for entry in alike if not entry.is_own]
        for entry in others if own else ():
            message = (
                f"{kind} '{name}' is Dovetail's own: that of {entry.origin} is '{entry.qualified_name}' in configs"
            )
            yield finding("taken-name", entry.label, message, f"Write '{entry.qualified_name}' in configs.")
        if not own and len(others) > 1:
            choices = sorted((entry.qualified_name for entry in others), key=normalize_name)
            message = f"{kind} '{name}' is brought by {len(others)} distributions: configs must write one of {choices}"
            yield finding("duplicate-name", f"{kind} '{name}'", message)


def extra_of(distribution: str, module: str) -> str | None:
    """The extra of a distribution that brings a module, as far as names show."""
    wanted = normalize_name(module.partition(".")[0])
    for requirement in _requirements(metadata.distribution(distribution)):
        if normalize_name(requirement.name) != wanted or requirement.marker is None:
            continue
        extras = metadata.distribution(distribution).metadata.get_all("Provides-Extra") or []
        for extra in [*extras, *_named_extras(requirement)]:
            if requirement.marker.evaluate({"extra": extra}) and not requirement.marker.evaluate({"extra": ""}):
                return str(extra)
    return None


def _other_python(distribution: metadata.Distribution, subject: str) -> Iterator[Finding]:
    here = f"Python {sys.version_info.major}.{sys.version_info.minor} on this machine"
    required = (distribution.metadata.get_all("Requires-Python") or [None])[0]
    try:
        if required and ".".join(map(str, sys.version_info[:3])) not in SpecifierSet(required):
            yield finding("other-python", subject, f"{subject} requires Python {required}, and this is {here}")
    except InvalidSpecifier:
        pass
    lines = (distribution.read_text("WHEEL") or "").splitlines()
    written = [line.partition(":")[2].strip() for line in lines if line.startswith("Tag:")]
    tags = {tag for text in written for tag in parse_tag(text)}
    if tags and tags.isdisjoint(sys_tags()):
        yield finding(
            "other-python", subject, f"{subject} is a wheel for {', '.join(written)}, which does not fit {here}"
        )


def _missing_dependencies(distribution: metadata.Distribution, subject: str) -> Iterator[Finding]:
    for requirement in _requirements(distribution):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            problem = "which is not installed"
        else:
            if requirement.specifier.contains(version, prereleases=True):
                continue
            problem = f"and {version} is installed"
        wanted = f"{requirement.name}{requirement.specifier}"
        yield finding(
            "missing-dependency", subject, f"{subject} requires {wanted}, {problem}", f'pip install "{wanted}"'
        )


def _requirements(distribution: metadata.Distribution) -> Iterator[Requirement]:
    for text in distribution.requires or ():
        try:
            yield Requirement(text)
        except InvalidRequirement:
            continue


def _named_extras(requirement: Requirement) -> list[str]:
    """Extras that a marker names, for metadata that does not list them."""
    words = str(requirement.marker).replace("'", '"').split('"')
    return [word for word in words[1::2] if word]


def _some(paths: tuple[str, ...]) -> str:
    more = len(paths) - _SHOWN
    return ", ".join(paths[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
