"""Runs the conformance suite of a plugin's kind on the plugin, without a test file: what `dovetail plugins test` does.

    python -m dovetail.testing.conformance REFERENCE [--kind KIND] [--suite NAME] [--set NAME=VALUE ...]
        [--default NAME=VALUE ...] [--out report.json]

The suite is that of the installed Dovetail, and the plugin may be a wheel without its sources.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from dovetail.contracts.errors import DovetailError, PluginError
from dovetail.contracts.kinds import KINDS
from dovetail.registry.entries import HOOKS_KIND, Entry, kind_version
from dovetail.registry.imports import module_command
from dovetail.registry.loading import base_class, class_variables, import_object, infer_kind
from dovetail.registry.registry import Registry, direct_entry
from dovetail.testing import VERSION, hints
from dovetail.testing._session import Result, run_class, subclass
from dovetail.testing._watch import Journal, Watch
from dovetail.testing.hints import Hint
from dovetail.testing.quirks import Quirk
from dovetail.testing.suite import SUITES, Suite, suites_of


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
    """Attributes of the suite, functions as references."""
    functions: Mapping[str, Any] = field(default_factory=dict)
    """By the names of attributes that were given as references."""

    @property
    def attributes(self) -> dict[str, Any]:
        """What is set on the suite's subclass: what an author writes there."""
        functions = {name: staticmethod(function) for name, function in self.functions.items()}
        return {"plugin": self.plugin, **self.given, **functions}

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


def load_tested(
    registry: Registry,
    entry: Entry,
    attributes: Mapping[str, Any],
    *,
    suite_name: str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Tested:
    """Imports a plugin and the suite of its kind.

    Args:
        registry: That has the entry.
        entry: Of the plugin.
        attributes: Of the suite.
        suite_name: Another suite of the kind than its usual one.
        defaults: Attributes that are set where the suite has them and `attributes` does not give them.

    Raises:
        PluginError: The plugin cannot be loaded, its suite has no such attribute, or lacks one.
    """
    suite = SUITES[entry.kind].load() if suite_name is None else _find_suite(suite_name, entry.kind)
    known = _settable(suite)
    if unknown := [name for name in attributes if name not in known]:
        raise PluginError(f"{suite.__name__} has no attribute {unknown[0]!r}; it has: {', '.join(known)}")
    given = {**{name: value for name, value in (defaults or {}).items() if name in known}, **attributes}
    functions = {name: _import_function(name, given[name], entry) for name in suite.function_attributes & given.keys()}
    plugin = import_object(entry) if entry.kind == HOOKS_KIND else registry.load_entry(entry)
    fitting = {name: _as_declared(suite, name, value) for name, value in given.items()}
    tested = Tested(entry, plugin, suite, fitting, functions)
    if reason := subclass(suite, tested.attributes, suite.__name__).reason_incomplete():
        raise PluginError(reason)
    return tested


def _find_suite(name: str, kind: str) -> type[Suite]:
    suites = suites_of(kind)
    if name not in suites:
        raise PluginError(f"there is no suite {name} of kind {kind}; suites: {', '.join(suites)}")
    return suites[name]


def _import_function(name: str, reference: Any, entry: Entry) -> Any:
    """The function that an attribute of the suite names."""
    found = direct_entry(entry.kind, reference) if isinstance(reference, str) else None
    if found is None:
        raise PluginError(
            f"{name}={reference!r} names no function: write ./file.py:function or package.module:function"
        )
    function = import_object(found)
    if not callable(function):
        raise PluginError(f"{name}={reference}: {function!r} cannot be called")
    return function


def _as_declared(suite: type[Suite], name: str, value: Any) -> Any:
    """A value of YAML, which has no bytes and no sets, in the type of the attribute's default."""
    default = next((vars(base)[name] for base in suite.__mro__ if name in vars(base)), None)
    if isinstance(default, bytes) and isinstance(value, str):
        return value.encode()
    return frozenset(value) if isinstance(default, frozenset) and isinstance(value, list) else value


def _settable(suite: type[Suite]) -> list[str]:
    """Names of the attributes that an author may give."""
    names = {name for name in class_variables(suite) if not name.startswith("_")}
    names |= {"options"} & set(dir(suite))  # a fixture, where tests set them up
    return sorted(names - {"kind", "plugin", "function_attributes"})


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
    parser.add_argument("--suite", help="another suite of the kind than its usual one")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an attribute of the suite")
    parser.add_argument(
        "--default", action="append", default=[], metavar="NAME=VALUE", help="one that a suite without it does not get"
    )
    parser.add_argument("--out", type=Path, help="write the report here, as JSON")
    parser.add_argument("--hints", action=argparse.BooleanOptionalAction, default=True, help="try what is not declared")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for importing, and for each test")
    parser.add_argument("--watch", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--journal", type=Path, help=argparse.SUPPRESS)
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
            attributes, defaults = _parse_attributes(given.set), _parse_attributes(given.default)
            tested = load_tested(registry, entry, attributes, suite_name=given.suite, defaults=defaults)
        if given.answer:
            hints.answer(tested.suite, tested.attributes)
            return 0
        journal = Journal(given.journal)
        journal.write(asdict(tested.report(())))
        report = tested.report(run_class(tested.suite, tested.attributes, watch=watch, journal=journal))
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
    """Of all kinds: their bases say of which kind a class is."""
    for kind in KINDS:
        base_class(kind)


def _answering(given: argparse.Namespace) -> list[str]:
    """The command of a process that tries capabilities."""
    command = module_command("dovetail.testing.conformance", given.reference, "--answer")
    for option, value in (("--kind", given.kind), ("--suite", given.suite)):
        command += [] if value is None else [option, value]
    for option, values in (("--set", given.set), ("--default", given.default)):
        command += [part for value in values for part in (option, value)]
    return command


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
