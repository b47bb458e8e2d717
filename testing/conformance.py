"""Runs the conformance suite of a plugin's kind on the plugin, without a test file: what `dovetail plugins test` does.

    python -m dovetail.testing.conformance REFERENCE [--kind KIND] [--set NAME=VALUE ...] [--out report.json]

The suite is that of the installed Dovetail, and the plugin may be a wheel without its sources.
"""

from __future__ import annotations

import argparse
import inspect
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from dovetail.contracts.errors import DovetailError, PluginError
from dovetail.contracts.kinds import KINDS
from dovetail.registry.entries import HOOKS_KIND, Entry, kind_version
from dovetail.registry.imports import module_command
from dovetail.registry.loading import base_class, import_object, infer_kind
from dovetail.registry.registry import Registry, direct_entry
from dovetail.testing import VERSION, hints
from dovetail.testing._session import Result, run_class
from dovetail.testing._watch import Watch
from dovetail.testing.hints import Hint
from dovetail.testing.quirks import Quirk
from dovetail.testing.suite import SUITES, Suite


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
    hints: tuple[Hint, ...] = ()
    """Capabilities that could be declared."""

    def count(self, outcome: str) -> int:
        """Cases that ended so: "passed", "failed", "skipped" or "quirk"."""
        return sum(result.outcome == outcome for result in self.results)

    def save(self, path: Path) -> None:
        """Writes it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2, default=repr) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Tested:
    """A plugin, and the suite with which it is tested."""

    entry: Entry
    plugin: Any
    """Its class; of hooks, their module or object."""
    suite: type[Suite]
    given: Mapping[str, Any]
    """Attributes of the suite."""

    @property
    def attributes(self) -> dict[str, Any]:
        """What is set on the suite's subclass: what an author writes there."""
        return {"plugin": self.plugin, **self.given}

    def report(self, results: Sequence[Result]) -> Report:
        """Of what the suite found."""
        entry = self.entry
        return Report(
            plugin=entry.qualified_name,
            kind=entry.kind,
            reference=entry.reference,
            distribution=entry.origin if entry.distribution else None,
            contract=kind_version(entry.kind) if entry.kind == HOOKS_KIND else ".".join(map(str, self.plugin.contract)),
            suite=f"dovetail.testing.{self.suite.__name__}",
            attributes=dict(self.given),
            versions=_versions(),
            machine=f"{platform.system()} {platform.machine()}",
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            results=tuple(results),
        )


def load_tested(registry: Registry, entry: Entry, attributes: Mapping[str, Any]) -> Tested:
    """Imports a plugin and the suite of its kind.

    Args:
        registry: That has the entry.
        entry: Of the plugin.
        attributes: Of the suite.

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
    missing = [name for name in _annotations(suite) if name not in dir(suite) and name not in ("kind", "plugin")]
    if absent := [name for name in missing if name not in attributes]:
        raise PluginError(f"{described.name} needs {absent[0]!r}: give it with --set {absent[0]}=VALUE")
    plugin = import_object(entry) if entry.kind == HOOKS_KIND else registry.load_entry(entry)
    return Tested(entry, plugin, suite, attributes)


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
    parser.add_argument("--kind", choices=SUITES, help="of the plugin; needed for a name")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an attribute of the suite")
    parser.add_argument("--out", type=Path, help="write the report here, as JSON")
    parser.add_argument("--hints", action=argparse.BooleanOptionalAction, default=True, help="try what is not declared")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for importing, and for each test")
    parser.add_argument("--watch", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    watch = Watch(given.watch, given.timeout)
    try:
        registry = Registry.scan()
        # Before the plugin, whose time alone is watched.
        if given.kind is None:
            _import_contracts()
        else:
            SUITES[given.kind].load()
        with watch.task(f"importing {given.reference}"):
            entry = _entry(registry, given.kind, given.reference)
            tested = load_tested(registry, entry, _parse_attributes(given.set))
        if given.answer:
            hints.answer(tested.suite, tested.attributes)
            return 0
        report = tested.report(run_class(tested.suite, tested.attributes, watch=watch))
    except DovetailError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_report(report)
    if given.hints and (wanted := hints.lacking(report.results)):
        report = replace(report, hints=tuple(hints.find_hints(_answering(given), wanted, given.timeout)))
        for hint in report.hints:
            print(f"hint     {hint}")
    if given.out is not None:
        report.save(given.out)
    return 1 if report.count("failed") else 0


def _import_contracts() -> None:
    """What tells the kind of a class."""
    for kind in KINDS:
        base_class(kind)


def _answering(given: argparse.Namespace) -> list[str]:
    """The command of a process that tries capabilities."""
    command = module_command("dovetail.testing.conformance", given.reference, "--answer")
    command += [] if given.kind is None else ["--kind", given.kind]
    return command + [part for each in given.set for part in ("--set", each)]


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


def _entry(registry: Registry, kind: str | None, reference: str) -> Entry:
    if kind is None:
        direct = direct_entry("plugin", reference)
        if direct is None:
            raise PluginError(f"give the kind of {reference!r} with --kind")
        return replace(direct, kind=infer_kind(direct))
    if kind != HOOKS_KIND:
        return registry.find(kind, reference)
    listed = [entry for entry in registry.hook_entries() if reference in (entry.name, entry.qualified_name)]
    found = listed[0] if listed else direct_entry(HOOKS_KIND, reference)
    if found is None:
        raise PluginError(f"there are no hooks {reference!r}")
    return found


if __name__ == "__main__":
    sys.exit(main())
