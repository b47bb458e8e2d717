"""Runs the conformance suite of a plugin's kind on the plugin, without a test file: what `dovetail plugins test` does.

    python -m dovetail.testing.conformance REFERENCE --kind KIND [--set NAME=VALUE ...] [--out report.json]

The suite is that of the installed Dovetail, and the plugin may be a wheel without its sources.
"""

from __future__ import annotations

import argparse
import inspect
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from dovetail.contracts.errors import DovetailError, PluginError
from dovetail.registry.entries import HOOKS_KIND, Entry, kind_version
from dovetail.registry.loading import import_object
from dovetail.registry.registry import Registry, direct_entry
from dovetail.testing import VERSION
from dovetail.testing._session import Result, run_class
from dovetail.testing.quirks import Quirk
from dovetail.testing.suite import SUITES


@dataclass(frozen=True)
class Report:
    """What a suite found."""

    plugin: str
    """Name or reference."""
    kind: str
    reference: str
    distribution: str | None
    """Name and version; None for a file or module."""
    contract: str
    """Version that the plugin declares; of hooks, the host's."""
    suite: str
    attributes: Mapping[str, Any]
    """Set on the suite."""
    versions: Mapping[str, str]
    """Of Dovetail, dovetail.testing, Python, torch."""
    machine: str
    time: str
    """ISO 8601."""
    results: tuple[Result, ...]

    def count(self, outcome: str) -> int:
        """Cases that ended so: "passed", "failed", "skipped" or "quirk"."""
        return sum(result.outcome == outcome for result in self.results)

    def save(self, path: Path) -> None:
        """Writes it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2, default=repr) + "\n", encoding="utf-8")


def check_plugin(registry: Registry, entry: Entry, attributes: Mapping[str, Any]) -> Report:
    """Runs the suite of the entry's kind.

    Args:
        registry: That has the entry.
        entry: Of the plugin.
        attributes: Set on the suite's subclass: what an author writes there.

    Raises:
        PluginError: The plugin cannot be loaded, its suite needs a test of its own, or has no such attribute.
    """
    described = SUITES[entry.kind]
    if described.needs:
        raise PluginError(
            f"the suite of a {entry.kind} needs {described.needs}: write a test with "
            f"dovetail.testing.{described.name} (docs/writing/testing.md)"
        )
    suite = described.load()
    unknown = [name for name in attributes if name not in dir(suite) and name not in _annotations(suite)]
    if unknown:
        raise PluginError(f"{described.name} has no attribute {unknown[0]!r}; it has: {', '.join(_settable(suite))}")
    is_hooks = entry.kind == HOOKS_KIND
    plugin: Any = import_object(entry) if is_hooks else registry.load_entry(entry)
    missing = [name for name in _annotations(suite) if name not in dir(suite) and name not in ("kind", "plugin")]
    if absent := [name for name in missing if name not in attributes]:
        raise PluginError(f"{described.name} needs {absent[0]!r}: give it with --set {absent[0]}=VALUE")
    results = run_class(suite, {"plugin": plugin, **attributes})
    return Report(
        plugin=entry.qualified_name,
        kind=entry.kind,
        reference=entry.reference,
        distribution=entry.origin if entry.distribution else None,
        contract=kind_version(entry.kind) if is_hooks else ".".join(map(str, plugin.contract)),
        suite=f"dovetail.testing.{described.name}",
        attributes=dict(attributes),
        versions=_versions(),
        machine=f"{platform.system()} {platform.machine()}",
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        results=tuple(results),
    )


def _annotations(suite: type) -> list[str]:
    """Names of the class variables of the suite and its bases."""
    declared = [inspect.get_annotations(base) for base in suite.__mro__]
    return [name for each in declared for name, kind in each.items() if str(kind).startswith("ClassVar")]


def _settable(suite: type) -> list[str]:
    return sorted({name for name in _annotations(suite) if not name.startswith("_")} - {"kind", "plugin"})


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    found = {name: version(name) for name in ("dovetail", "torch", "pytest")}
    return {**found, "dovetail.testing": str(VERSION), "python": platform.python_version()}


def _parse_attributes(written: Sequence[str]) -> dict[str, Any]:
    """From NAME=VALUE, values as YAML."""
    attributes: dict[str, Any] = {}
    for each in written:
        name, equals, value = each.partition("=")
        if not equals:
            raise PluginError(f"--set {each}: write NAME=VALUE")
        try:
            attributes[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise PluginError(f"--set {each}: the value is no YAML: {error}") from error
    if "quirks" in attributes:
        attributes["quirks"] = _parse_quirks(attributes["quirks"])
    return attributes


def _parse_quirks(written: Any) -> dict[str, Quirk]:
    """From {"test_name": {"reason": ..., "expires": "2.0"}}."""
    try:
        return {name: Quirk(**fields) for name, fields in written.items()}
    except (AttributeError, TypeError) as error:
        raise PluginError(f"--set quirks: write {{test_name: {{reason: ..., expires: '2.0'}}}}: {error}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a suite; returns 0 where all passed, 1 where something failed, 2 where the suite could not run."""
    parser = argparse.ArgumentParser(prog="python -m dovetail.testing.conformance", description=__doc__)
    parser.add_argument("reference", help="dist:name, a name, ./file.py:Class or package.module:Class")
    parser.add_argument("--kind", required=True, choices=SUITES)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an attribute of the suite")
    parser.add_argument("--out", type=Path, help="write the report here, as JSON")
    given = parser.parse_args(arguments)
    try:
        registry = Registry.scan()
        report = check_plugin(registry, _entry(registry, given.kind, given.reference), _parse_attributes(given.set))
    except DovetailError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_report(report)
    if given.out is not None:
        report.save(given.out)
        print(f"report: {given.out}")
    return 1 if report.count("failed") else 0


def print_report(report: Report) -> None:
    """Every case that was skipped, has a quirk or failed, and the sums."""
    for outcome in ("skipped", "quirk"):
        for result in report.results:
            if result.outcome == outcome:
                print(f"{outcome:<8} {result.name}: {result.text}")
    for result in report.results:
        if result.outcome == "failed":
            print(f"FAILED   {result.name}\n{result.text}\n")
    seconds = sum(result.seconds for result in report.results)
    counts = ", ".join(f"{report.count(outcome)} {outcome}" for outcome in ("passed", "failed", "skipped"))
    if quirks := report.count("quirk"):
        counts += f", {quirks} failed as its quirks say"
    print(f"{report.plugin} ({report.kind} {report.contract}), {report.suite}: {counts} in {seconds:.1f} s")


def _entry(registry: Registry, kind: str, reference: str) -> Entry:
    if kind != HOOKS_KIND:
        return registry.find(kind, reference)
    listed = [entry for entry in registry.hook_entries() if reference in (entry.name, entry.qualified_name)]
    found = listed[0] if listed else direct_entry(HOOKS_KIND, reference)
    if found is None:
        raise PluginError(f"there are no hooks {reference!r}")
    return found


if __name__ == "__main__":
    sys.exit(main())
