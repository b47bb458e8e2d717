"""`dovetail plugins`: what is installed, what one plugin offers, and whether all of them work."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dovetail.commands import create_console, print_warning
from dovetail.commands.installed import (
    HOOKS_KIND,
    Entry,
    Finding,
    Registry,
    base_class,
    class_facts,
    diagnose,
    kind_version,
    reference_entry,
    written_text,
)
from dovetail.contracts.command import Command
from dovetail.contracts.errors import PluginError
from dovetail.contracts.kinds import KINDS
from dovetail.contracts.plugin import Plugin

app = typer.Typer(no_args_is_help=True, help="List, describe and examine plugins.")


class PluginsCommand(Command):
    """List, describe and examine plugins."""

    contract: ClassVar[tuple[int, int]] = (1, 0)

    def app(self) -> typer.Typer:
        return app


KindOption = Annotated[str | None, typer.Option("--kind", help="Only plugins of this kind.")]

_SHOWN_APART = ("contract", "Options", "stability")


@app.command("list")
def list_plugins(
    kind: KindOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List installed plugins from their metadata, without importing any."""
    registry = Registry.scan()
    if kind != HOOKS_KIND:
        _require_kind(kind)
    entries = [entry for entry in registry.metadata.entries if kind in (None, entry.kind)]
    if as_json:
        facts = [{**dataclasses.asdict(entry), "stability": _stability(entry)} for entry in entries]
        typer.echo(json.dumps(facts, indent=2))
        return
    table = Table("kind", "name", "distribution", "contract", "stability", "reference")
    for entry in entries:
        contract = f"v{entry.major}" if entry.refusal is None else f"v{entry.major} (refused)"
        stability = _stability(entry) or ""
        table.add_row(*_cells(entry.kind, entry.name, entry.origin, contract, stability, entry.reference))
    create_console().print(table)
    for entry in entries:
        if entry.refusal is not None:
            print_warning(f"{entry.label}: {entry.refusal}")
    for warning in registry.metadata.warnings:
        print_warning(warning)


@app.command("info")
def show_plugin(
    name: Annotated[str, typer.Argument(help="A name, dist:name, ./file.py:Class or package.module:Class.")],
    kind: KindOption = None,
) -> None:
    """Load one plugin and print its description, capabilities and options."""
    registry = Registry.scan()
    _require_kind(kind)
    entry = _find(registry, name, kind)
    plugin = registry.load_entry(entry)
    console = create_console()
    facts = Table(box=None, show_header=False)
    for label, value in _describe(entry, plugin):
        facts.add_row(*_cells(label, value))
    console.print(facts)
    console.print(Text(f"\n{inspect.getdoc(plugin) or '(no docstring)'}\n"))
    _print_options(console, plugin)


@app.command("doctor")
def examine_plugins(
    references: Annotated[
        list[str] | None, typer.Argument(help="Also examine these: ./file.py:Class or package.module:Class.")
    ] = None,
) -> None:
    """Load every plugin separately and report broken ones. The exit code is 1 if there are any."""
    diagnosis = diagnose(Registry.scan(), references or [])
    table = Table("kind", "name", "distribution", "status")
    for finding in diagnosis.findings:
        entry = finding.entry
        table.add_row(*_cells(entry.kind, entry.name, entry.origin, _status(finding)))
    create_console().print(table)
    for warning in diagnosis.warnings:
        print_warning(warning)
    for finding in diagnosis.broken:
        print_warning(str(finding.problem))
    if diagnosis.broken:
        raise typer.Exit(1)


@app.command("test")
def run_suite(
    name: Annotated[str, typer.Argument(help="A name, dist:name, ./file.py:Class or package.module:Class.")],
    kind: KindOption = None,
    attributes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="An attribute of the suite, such as tolerance=0.01."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the report to this file, as JSON.")] = None,
) -> None:
    """Run the conformance suite of the plugin's kind. The exit code is 1 if a test fails."""
    if importlib.util.find_spec("pytest") is None:
        raise PluginError("the suites need pytest: pip install 'dovetail[testing]'")
    if kind == HOOKS_KIND:
        tested, of_kind = name, HOOKS_KIND
    else:
        _require_kind(kind)
        entry = _find(Registry.scan(), name, kind)
        tested, of_kind = entry.qualified_name if entry.distribution else entry.reference, entry.kind
    # A process of its own: what a plugin breaks, and where it hangs, ends with it.
    command = [sys.executable, "-m", "dovetail.testing.conformance", tested, "--kind", of_kind]
    command += [part for each in attributes or [] for part in ("--set", each)]
    command += ["--out", str(out)] if out is not None else []
    if code := subprocess.run(command, check=False).returncode:
        raise typer.Exit(code)


def _stability(entry: Entry) -> str | None:
    """As its source has it; None for hooks, which have none, and where there is no source."""
    return written_text(entry.reference, "stability") if entry.kind != HOOKS_KIND else None


def _status(finding: Finding) -> str:
    if finding.problem is None:
        return "ok"
    return f"broken: {finding.problem.splitlines()[0].removeprefix(finding.entry.label).removeprefix(':').strip()}"


def _cells(*values: str) -> list[Text]:
    """Texts, so that square brackets in names are no markup."""
    return [Text(value, overflow="fold") for value in values]


def _require_kind(kind: str | None) -> None:
    if kind is not None and kind not in KINDS:
        raise PluginError(f"there is no plugin kind '{kind}'; kinds: {', '.join(KINDS)}")


def _find(registry: Registry, name: str, kind: str | None) -> Entry:
    """The entry of `name`; without a kind, the one kind that knows the name."""
    if kind is not None:
        return registry.find(kind, name)
    bare = name.rpartition(":")[2]
    kinds = {entry.kind for entry in registry.metadata.entries if bare == entry.name and entry.kind in KINDS}
    found = [entry for entry in (_attempt(registry, each, name) for each in sorted(kinds)) if entry is not None]
    if len(found) == 1:
        return found[0]
    if found:
        raise PluginError(
            f"'{name}' is a name of several kinds: add --kind {' or --kind '.join(e.kind for e in found)}"
        )
    if len(kinds) == 1:
        return registry.find(kinds.pop(), name)
    if ":" in name:
        return reference_entry(name)
    known = sorted({entry.name for entry in registry.metadata.entries if entry.kind in KINDS})
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean '{nearest[0]}'?" if nearest else ""
    raise PluginError(f"there is no plugin '{name}'.{hint} Known: {', '.join(known)}")


def _attempt(registry: Registry, kind: str, name: str) -> Entry | None:
    try:
        entry = registry.find(kind, name)
    except PluginError:
        return None
    return entry if entry.distribution is not None else None


def _describe(entry: Entry, plugin: type[Plugin]) -> list[tuple[str, str]]:
    major, minor = plugin.contract
    rows = [
        ("kind", f"{entry.kind}: {KINDS[entry.kind].summary}"),
        ("name", entry.name),
        ("distribution", entry.origin if entry.distribution else "none (direct reference)"),
        ("reference", entry.reference),
        ("contract", f"{major}.{minor} (this Dovetail speaks {kind_version(entry.kind)})"),
        ("stability", plugin.stability),
    ]
    for name in class_facts(base_class(entry.kind)):
        if name not in _SHOWN_APART:
            rows.extend(_rows_of(name, inspect.getattr_static(plugin, name)))
    return rows


def _rows_of(name: str, value: Any) -> list[tuple[str, str]]:
    """A declared fact; a capability record gives one row per field."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f"{name}.{f.name}", _plain(vars(value)[f.name])) for f in dataclasses.fields(value)]
    return [(name, _plain(value))]


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "any"
    if isinstance(value, (frozenset, set)):
        return ", ".join(sorted(map(str, value))) or "none"
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _print_options(console: Console, plugin: type[Plugin]) -> None:
    fields = plugin.Options.model_fields
    if not fields:
        console.print("It takes no options.")
        return
    table = Table("option", "type", "default", "description")
    for name, field in fields.items():
        default = "required" if field.is_required() else repr(field.get_default(call_default_factory=True))
        table.add_row(*_cells(field.alias or name, _type_name(field), default, field.description or ""))
    console.print(table)


def _type_name(field: FieldInfo) -> str:
    annotation = field.annotation
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
    return ", ".join([name, *(str(constraint) for constraint in field.metadata)])
