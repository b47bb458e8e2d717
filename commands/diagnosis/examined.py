"""Imports plugins and examines their classes, in a process of its own.

`python -m dovetail.commands.diagnosis.examined` reads a list of entries as JSON from stdin, and writes a line of JSON
before and after each on the standard output that it was started with: what plugins print goes to stderr.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, get_type_hints

from dovetail.commands.diagnosis.asking import examine_answers
from dovetail.commands.diagnosis.finding import Finding, finding
from dovetail.commands.diagnosis.members import examine_members
from dovetail.commands.diagnosis.sources import reached
from dovetail.contracts.errors import PluginError
from dovetail.contracts.kinds import KINDS
from dovetail.contracts.plugin import Plugin
from dovetail.registry.entries import HOOKS_KIND, Entry
from dovetail.registry.hooks import HookCaller
from dovetail.registry.loading import base_class, class_problems, import_object, infer_kind


def examine_class(entry: Entry) -> Iterator[Finding]:
    """Findings about the plugin of an entry that its import shows. Ends at what makes the rest meaningless."""
    try:
        found = import_object(entry)
    except PluginError as error:
        yield finding(_code_of(error), entry.label, str(error))
        return
    if entry.kind == HOOKS_KIND:
        try:
            HookCaller().register(found, entry.qualified_name)
        except PluginError as error:
            yield finding("hooks-not-registered", entry.label, f"{entry.label}: {error}")
        return
    if entry.kind not in KINDS:
        yield finding("not-of-kind", entry.label, f"{entry.label}: it derives from no one base class of a kind")
        return
    base = base_class(entry.kind)
    if not (isinstance(found, type) and issubclass(found, Plugin) and issubclass(found, base)):
        message = f"{entry.label}: {entry.reference} is no subclass of {base.__module__}.{base.__qualname__}"
        yield finding("not-of-kind", entry.label, message)
        return
    problems = list(class_problems(entry, found))
    for problem in problems:
        yield finding(problem.code, problem.subject, f"{entry.label}: {problem.message}")
    codes = {problem.code for problem in problems}
    members = list(examine_members(entry, found, reached(entry.reference.rpartition(":")[0])))
    yield from members
    if "capabilities-record" not in codes:
        yield from _value_types(entry, found)
    cannot_be_asked = any(one.code == "incompatible-override" and ".check`" in one.message for one in members)
    if not (codes & {"capabilities-record", "options-model"} or cannot_be_asked):
        yield from examine_answers(entry, found)


def _with_kind(entry: Entry) -> Entry:
    """Of a direct reference the kind that its class has, where it has one."""
    if entry.kind in KINDS or entry.kind == HOOKS_KIND:
        return entry
    try:
        return dataclasses.replace(entry, kind=infer_kind(entry))
    except PluginError:  # which the examination will tell
        return entry


def _code_of(error: PluginError) -> str:
    cause = error.__cause__
    if isinstance(cause, ModuleNotFoundError) and "there is no module" in str(error).partition("\n")[0]:
        return "module-gone"
    if isinstance(cause, AttributeError) and " has no '" in str(error).partition("\n")[0]:
        return "class-gone"
    return "cannot-import"


def _value_types(entry: Entry, plugin: type[Plugin]) -> Iterator[Finding]:
    """Capabilities whose values have another type than their fields, as far as plain types tell."""
    record: Any = plugin.capabilities
    if not dataclasses.is_dataclass(record):
        return
    hints = get_type_hints(type(record))
    for one in dataclasses.fields(record):
        value = getattr(record, one.name)
        allowed = [getattr(each, "__origin__", each) for each in getattr(hints[one.name], "__args__", ())]
        allowed = allowed if getattr(hints[one.name], "__origin__", None) is None and allowed else []
        wanted = allowed or [getattr(hints[one.name], "__origin__", hints[one.name])]
        if all(isinstance(each, type) for each in wanted) and not isinstance(value, tuple(wanted)):
            names = " or ".join(each.__name__ for each in wanted)
            message = f"{entry.label}: its capability {one.name} is {value!r}, no {names}"
            yield finding("capability-type", entry.label, message)


def main() -> None:
    """Examines what stdin names."""
    entries = [Entry(**facts) for facts in json.load(sys.stdin)]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for given in entries:
        print(json.dumps({"begun": given.label}), file=answers, flush=True)
        entry = _with_kind(given)
        found = [dataclasses.asdict(one) for one in examine_class(entry)]
        print(json.dumps({"done": dataclasses.asdict(entry), "findings": found}), file=answers, flush=True)


if __name__ == "__main__":
    main()
