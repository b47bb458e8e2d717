"""Imports plugins and examines their classes, in a process of its own.

`python -m dovetail.commands.diagnosis.examined` reads a list of entries as JSON from stdin. Before and after each, and
after its import, it writes a line of JSON on the standard output that it was started with: what plugins print goes to
stderr.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from dovetail.commands.diagnosis.asking import examine_answers
from dovetail.commands.diagnosis.finding import Finding, finding, reference_remedy
from dovetail.commands.diagnosis.members import examine_members
from dovetail.commands.diagnosis.reach import reach_of
from dovetail.commands.diagnosis.values import examine_capabilities, examine_variables
from dovetail.contracts.errors import PluginError
from dovetail.contracts.kinds import KINDS
from dovetail.contracts.plugin import Plugin
from dovetail.engine.hooks import HookCaller
from dovetail.registry.entries import HOOKS_KIND, Entry
from dovetail.registry.loading import base_class, class_problems, import_object, infer_kind

_LATER = "Upgrade the older of the two, or declare in `contract` the version that the class was written for."


def examine_object(entry: Entry, found: object) -> Iterator[Finding]:
    """Findings about what the import of an entry gave. Ends at what makes the rest meaningless."""
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
        remedy = _LATER if problem.code == "other-contract" else None
        yield finding(problem.code, problem.subject, f"{entry.label}: {problem.message}", remedy)
    codes = {problem.code for problem in problems}
    members = list(examine_members(entry, found, reach_of(entry.reference)))
    yield from members
    yield from examine_variables(entry, found)
    mistyped = list(examine_capabilities(entry, found)) if "capabilities-record" not in codes else []
    yield from mistyped
    cannot_be_asked = any(one.code == "incompatible-override" and ".check`" in one.message for one in members)
    if not (codes & {"capabilities-record", "options-model"} or mistyped or cannot_be_asked):
        yield from examine_answers(entry, found)


def examine(entry: Entry, imported: Callable[[], None]) -> list[Finding]:
    """Findings about the plugin of an entry that its import shows. `imported` is called once that is done. An
    examination that fails is one more finding."""
    try:
        found = import_object(entry)
    except PluginError as error:
        code = _code_of(error)
        return [finding(code, entry.label, str(error), reference_remedy(code, entry))]
    imported()
    findings: list[Finding] = []
    try:
        for one in examine_object(entry, found):
            findings.append(one)  # one by one: those before a failure are kept
    except Exception as error:
        first = f"{entry.label} could not be examined: {type(error).__name__}: {error}"
        text = "".join(traceback.format_exception(error)).rstrip()
        findings.append(finding("examination-failed", entry.label, f"{first}\n\n{text}"))
    return findings


def _with_kind(entry: Entry) -> Entry:
    """Of a direct reference the kind that its class has, where it has one."""
    if entry.kind in KINDS or entry.kind == HOOKS_KIND:
        return entry
    try:
        return dataclasses.replace(entry, kind=infer_kind(entry))
    except PluginError:  # which the examination reports
        return entry


def _code_of(error: PluginError) -> str:
    cause = error.__cause__
    if isinstance(cause, ModuleNotFoundError) and "there is no module" in str(error).partition("\n")[0]:
        return "module-gone"
    if isinstance(cause, AttributeError) and " has no '" in str(error).partition("\n")[0]:
        return "class-gone"
    return "cannot-import"


def main() -> None:
    """Examines what stdin names."""
    entries = [Entry(**facts) for facts in json.load(sys.stdin)]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(line: dict[str, Any]) -> None:
        print(json.dumps(line), file=answers, flush=True)

    for given in entries:
        say({"begun": given.label})
        entry = _with_kind(given)
        found = examine(entry, partial(say, {"imported": given.label}))
        say({"done": dataclasses.asdict(entry), "findings": [dataclasses.asdict(one) for one in found]})


if __name__ == "__main__":
    main()
