"""What an examination can find: a record for each finding, and a table of all codes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from dovetail.registry.entries import Entry, Problem

Severity = Literal["error", "warning", "note"]
"""Error: the plugin cannot be used, or its code does not do what its author meant. Warning: it works, and something
will bite. Note: nothing to do."""


@dataclass(frozen=True)
class Code:
    """One kind of finding."""

    severity: Severity
    meaning: str
    """What is wrong, in a few words."""
    remedy: str
    """What to do."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a plugin or an installation."""

    code: str
    """One of `CODES`."""
    severity: Severity
    subject: str
    """The plugin (`Entry.label`), or the distribution."""
    message: str
    """What is wrong here; the first line is the summary, a traceback may follow."""
    remedy: str
    """What to do."""
    others: tuple[str, ...] = ()
    """Further plugins of which it is found, at the same place of a file that they share."""


_REINSTALL = "Install the distribution again."

CODES: dict[str, Code] = {
    # The installation.
    "no-metadata": Code("warning", "a distribution without METADATA", _REINSTALL),
    "unreadable-entry-points": Code("warning", "entry_points.txt cannot be read", _REINSTALL),
    "unknown-group": Code(
        "warning",
        "an entry-point group that names no kind",
        "Correct the group in pyproject.toml, or upgrade dovetail.",
    ),
    "stale-copy": Code(
        "warning",
        "one distribution twice on sys.path, an old egg-info for example",
        "Remove the copy that is not meant: the first one on sys.path is used.",
    ),
    "missing-files": Code("error", "files of the distribution are gone", _REINSTALL),
    "edited-files": Code(
        "warning",
        "installed files were changed after the installation",
        "Install the distribution again, or in place (pip install -e) where you work on it.",
    ),
    "other-python": Code(
        "error", "made for another Python", "Install a wheel for this Python, or build one from the sources."
    ),
    "missing-dependency": Code(
        "error", "a distribution that the plugin's own requires is not installed, or of another version", "Install it."
    ),
    "missing-extra": Code(
        "error", "the plugin imports what only an extra of its distribution brings", "Install the extra."
    ),
    "duplicate-name": Code(
        "warning", "two distributions bring one name", "Write dist:name in configs, or uninstall one of them."
    ),
    "taken-name": Code("note", "Dovetail's own plugin has the plain name", "Write dist:name in configs."),
    # The entry point.
    "bad-entry-point": Code(
        "error", "the entry point's value is no reference", "Write 'package.module:Class' in pyproject.toml."
    ),
    "other-contract": Code("error", "written for another version of the contract", "Upgrade the plugin, or dovetail."),
    "unknown-name": Code("error", "there is no such plugin", "Look at `dovetail plugins list`."),
    "module-gone": Code(
        "error",
        "the module of the entry point is not there",
        "Correct the entry point, and install the distribution again: entry points are read at installation.",
    ),
    "class-gone": Code(
        "error",
        "the module has no such class",
        "Correct the entry point, and install the distribution again: entry points are read at installation.",
    ),
    # The import.
    "cannot-import": Code("error", "the import raises", "Mend what the traceback shows."),
    "hangs-in-import": Code(
        "error", "the import does not end", "Do no work in the module's body: read and load in `__init__`, or later."
    ),
    "hangs-in-check": Code(
        "error",
        "`check`, or the creation of `Options`, does not end",
        "Answer from what `check` is given: it must not read models, wait or use the network.",
    ),
    "examination-failed": Code(
        "warning",
        "the examination itself failed on the plugin",
        "Mend the other findings first; where none is left, report the traceback to Dovetail.",
    ),
    "ends-process": Code(
        "error", "the import or the examination ends the process", "Do no work in the module's body and in `check`."
    ),
    # The class.
    "not-of-kind": Code("error", "no subclass of its kind's base class", "Derive from the kind's base class."),
    "hooks-not-registered": Code(
        "error", "hooks that match no hook, or take other arguments", "Compare with dovetail.contracts.hooks."
    ),
    "contract-version": Code(
        "error", "the class does not say its contract version", "Declare `contract = (major, minor)`."
    ),
    "newer-member": Code(
        "error",
        "the class uses what a later minor version of the contract brought than the one it declares",
        "Declare the version that brought it: an older host would accept the plugin, and fail in a run.",
    ),
    "missing-method": Code("error", "an abstract method is not implemented", "Implement it."),
    "misspelt-override": Code(
        "error",
        "a name close to one of the contract's, which overrides nothing",
        "Correct the name, or choose another.",
    ),
    "incompatible-override": Code(
        "error", "the host's call does not fit the method", "Take the parameters that the contract has."
    ),
    "renamed-parameter": Code(
        "warning", "a parameter has another name than the contract's", "Use the contract's names: they are part of it."
    ),
    "ability-not-derived": Code(
        "error", "a method of an optional ability in a class that does not derive from it", "Derive from the ability."
    ),
    "false-capability": Code(
        "error", "a capability that the class does not back", "Implement it, or do not declare it."
    ),
    "capabilities-record": Code(
        "error", "`capabilities` is not the kind's record", "Write the record that the kind's contract has."
    ),
    "capability-type": Code(
        "error", "a capability's value has another type than the record's field", "Write a value of the field's type."
    ),
    "capability-value": Code(
        "error",
        "a capability is a number that nothing can have",
        "Write 1 or more; None means any where the field's type has it.",
    ),
    "variable-type": Code(
        "error",
        "a class variable of the contract has a value of another type",
        "Write a value of the type that the contract has.",
    ),
    "unknown-stability": Code(
        "error", "`stability` is none of the known", "Write 'experimental', 'provisional' or 'stable'."
    ),
    "options-model": Code("error", "`Options` is no PluginOptions", "Derive it from PluginOptions."),
    "options-cannot-travel": Code(
        "error", "the default options cannot be written as JSON and read again", "Use plain types in Options."
    ),
    "check-raises": Code(
        "error", "`check` raises for a need that the capabilities cover", "Return reasons, do not raise them."
    ),
    "check-returns": Code(
        "error", "`check` returns something else than a list of sentences", "Return a list of str, empty for yes."
    ),
    "private-import": Code(
        "warning",
        "an import of something in dovetail that is not public",
        "Import public modules only (docs/surface lists them): others change without notice.",
    ),
    "foreign-import": Code(
        "warning",
        "an import of something in dovetail that is for plugins of another kind",
        "Use what the contract hands to the plugin; records such as SamplingParams are in dovetail.contracts.",
    ),
}

_PLACED = frozenset({"private-import", "foreign-import"})
"""Codes whose messages name a place in a file."""


def finding(code: str, subject: str, message: str, remedy: str | None = None) -> Finding:
    """A finding of one of the codes; with a remedy of its own where there is a better one than the code's."""
    known = CODES[code]
    return Finding(code, known.severity, subject, message, remedy or known.remedy)


def reference_remedy(code: str, entry: Entry) -> str | None:
    """What to do about a module or class that is gone where no entry point named it; else None, the code's own."""
    if entry.distribution is not None:
        return None
    return {
        "module-gone": "Correct the reference, or put the module's folder on PYTHONPATH.",
        "class-gone": "Correct the reference: name a class that is in it.",
    }.get(code)


def from_problem(problem: Problem) -> Finding:
    """A problem of the registry's as a finding."""
    return finding(problem.code, problem.subject, problem.message)


def once_per_place(findings: Iterable[Finding]) -> list[Finding]:
    """Those that say the same of one line of a file for several plugins as one, which names the first of them."""
    merged: dict[object, Finding] = {}
    for one in findings:
        said = one.message.removeprefix(one.subject)
        key = (one.code, said) if one.code in _PLACED else one
        first = merged.setdefault(key, one)
        if one.subject not in (first.subject, *first.others):
            others = (*first.others, one.subject)
            message = f"{first.subject} and {len(others)} more{said}"
            merged[key] = replace(first, message=message, others=others)
    return list(merged.values())


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Each finding once, errors first; else in the order in which they were found."""
    order = ("error", "warning", "note")
    return sorted(dict.fromkeys(findings), key=lambda one: order.index(one.severity))
