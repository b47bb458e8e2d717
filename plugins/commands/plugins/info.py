"""`dovetail plugins info`."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Annotated, Any

import pluggy
import typer
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.table import Table
from rich.text import Text

import dovetail.contracts.hooks as specs
from dovetail.commands import create_console
from dovetail.commands.installed import (
    HOOKS_KIND,
    Entry,
    Registry,
    base_class,
    class_facts,
    import_object,
    kind_version,
)
from dovetail.contracts.errors import PluginError
from dovetail.contracts.kinds import KINDS
from dovetail.contracts.plugin import Plugin
from dovetail.plugins.commands.plugins.cells import cells
from dovetail.plugins.commands.plugins.lookup import KindOption, find_entry, require_kind

_SHOWN_APART = ("contract", "Options", "stability")


def show_plugin(
    name: Annotated[str, typer.Argument(help="A name, dist:name, ./file.py:Class or package.module:Class.")],
    kind: KindOption = None,
) -> None:
    """Load one plugin and print its description, capabilities and options."""
    registry = Registry.scan()
    require_kind(kind)
    entry = find_entry(registry, name, kind)
    console = create_console()
    if entry.kind == HOOKS_KIND:
        hooks = import_object(entry)
        _print_facts(console, _describe_hooks(entry, hooks), hooks)
        return
    plugin = registry.load_entry(entry)
    _print_facts(console, _describe(entry, plugin), plugin)
    _print_options(console, plugin)


def _print_facts(console: Console, rows: list[tuple[str, str]], plugin: object) -> None:
    facts = Table(box=None, show_header=False)
    for label, value in rows:
        facts.add_row(*cells(label, value))
    console.print(facts)
    console.print(Text(f"\n{inspect.getdoc(plugin) or '(no docstring)'}\n"))


def _describe_hooks(entry: Entry, hooks: object) -> list[tuple[str, str]]:
    manager = pluggy.PluginManager(specs.PROJECT)
    manager.add_hookspecs(specs)
    try:
        manager.register(hooks)
    except (pluggy.PluginValidationError, ValueError) as error:
        raise PluginError(f"{entry.label}: {error}") from error
    called = sorted(caller.name for caller in manager.get_hookcallers(hooks) or ())
    return [
        ("kind", f"{HOOKS_KIND}: for what happens to an engine"),
        ("name", entry.name),
        ("distribution", entry.origin if entry.distribution else "none (direct reference)"),
        ("reference", entry.reference),
        ("contract", f"{entry.major} (this Dovetail speaks {kind_version(HOOKS_KIND)})"),
        ("listens to", ", ".join(called) or "none"),
    ]


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
        table.add_row(*cells(field.alias or name, _type_name(field), default, field.description or ""))
    console.print(table)


def _type_name(field: FieldInfo) -> str:
    annotation = field.annotation
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
    return ", ".join([name, *(str(constraint) for constraint in field.metadata)])
