"""What a class gets wrong about the members of its contract: names, signatures, versions."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pkgutil import iter_modules
from typing import Any

from dovetail import contracts
from dovetail.commands.diagnosis.finding import Finding, finding
from dovetail.commands.diagnosis.reach import Reach
from dovetail.commands.diagnosis.surface import is_public, since
from dovetail.contracts.plugin import Plugin
from dovetail.registry.entries import Entry
from dovetail.registry.loading import base_class

_CLOSE = 0.85
"""Ratio of `difflib` from which on two names are taken for one that is misspelt."""
_LEAST = 4
"""Length from which on names are compared: short ones are close to each other by chance."""


def examine_members(entry: Entry, plugin: type[Plugin], reach: Reach) -> Iterator[Finding]:
    """Findings about the members of a class that derives from its kind's base class."""
    lineage = _Lineage(entry, plugin)
    yield from _names(lineage)
    yield from _overrides(lineage)
    yield from _newer(lineage, reach)


class _Lineage:
    """A class's bases: those of the contract and other public ones, and its author's own."""

    def __init__(self, entry: Entry, plugin: type[Plugin]):
        self.entry, self.plugin = entry, plugin
        self.bases = [c for c in plugin.__mro__ if c is not plugin and c is not object and is_public(c.__module__)]
        self.own = [c for c in plugin.__mro__ if c not in self.bases and c is not object]
        self.abilities = [one for one in _abilities(base_class(entry.kind)) if one not in plugin.__mro__]

    def own_members(self) -> Iterator[tuple[type, str]]:
        """Public names that the author's classes define."""
        for owner in self.own:
            for name in dict.fromkeys([*vars(owner), *inspect.get_annotations(owner)]):
                if not name.startswith("_"):
                    yield owner, name

    def base_of(self, name: str) -> type | None:
        """The public base that defines a member first."""
        return next((base for base in self.bases if name in vars(base)), None)

    def known(self) -> set[str]:
        """Public members of all bases."""
        return {
            n for base in self.bases for n in [*vars(base), *inspect.get_annotations(base)] if not n.startswith("_")
        }


def _abilities(base: type[Plugin]) -> list[type[Plugin]]:
    """The abstract classes of the contracts from which plugins of a kind may derive as well."""
    modules = [
        importlib.import_module(f"{contracts.__name__}.{each.name}") for each in iter_modules(contracts.__path__)
    ]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    return list(dict.fromkeys(one for one in found if issubclass(one, base) and one is not base))


def _names(lineage: _Lineage) -> Iterator[Finding]:
    label, known = lineage.entry.label, lineage.known()
    defined = {name for _, name in lineage.own_members()}

    def is_meant(member: str, name: str, owner: type) -> bool:
        """Whether a class has `name` as well as a member of the contract that it or its author's base has."""
        return member in vars(owner) or (member in defined and (name.startswith(member) or member.startswith(name)))

    abilities = {name: ability for ability in lineage.abilities for name in ability.__abstractmethods__ - known}
    for owner, name in lineage.own_members():
        if name in known or name not in vars(owner):
            continue
        if name in abilities:
            if callable(inspect.getattr_static(owner, name, None)) or isinstance(vars(owner).get(name), classmethod):
                ability = abilities[name].__name__
                message = f"{label}: {owner.__qualname__} has `{name}`, and does not derive from {ability}"
                yield finding("ability-not-derived", label, message, f"Derive {owner.__qualname__} from {ability}.")
            continue
        candidates = [one for one in known | set(abilities) if len(one) >= _LEAST and not is_meant(one, name, owner)]
        close = difflib.get_close_matches(name, candidates, n=1, cutoff=_CLOSE) if len(name) >= _LEAST else []
        if close:
            message = f"{label}: `{name}` of {owner.__qualname__} overrides nothing; the contract has `{close[0]}`"
            yield finding(
                "misspelt-override", label, message, f"Write `{close[0]}`, or choose a name that is not close."
            )


def _overrides(lineage: _Lineage) -> Iterator[Finding]:
    label = lineage.entry.label
    for name in dict.fromkeys(["__init__", *(name for _, name in lineage.own_members())]):
        owner = next((c for c in lineage.own if name in vars(c)), None)
        base = lineage.base_of(name)
        if owner is None or base is None:
            continue
        problem = _misfit(vars(base)[name], vars(owner)[name], is_init=name == "__init__")
        if problem is not None:
            code, text = problem
            where = f"{label}: `{owner.__qualname__}.{name}` overrides that of {base.__qualname__}"
            remedy = f"Write {_written(name, vars(base)[name])}." if callable(_plain(vars(base)[name])) else None
            yield finding(code, label, f"{where}, and {text}", remedy)


def _misfit(base: Any, own: Any, *, is_init: bool) -> tuple[str, str] | None:
    """Why the host's use of a member does not fit an override of it: a code and the end of a sentence."""
    wrong = "incompatible-override"
    if not callable(_plain(base)):
        if isinstance(base, property) and inspect.isfunction(own):
            return wrong, "is a method: the host reads it, so make it a property or an attribute"
        return None
    if not callable(_plain(own)) or isinstance(own, property):
        return wrong, "is no method: the host calls it"
    if isinstance(base, classmethod) and not isinstance(own, classmethod | staticmethod):
        return wrong, "is no class method: the host calls it without an instance"
    if isinstance(own, type):
        return None
    for is_kind, what in ((inspect.iscoroutinefunction, "a coroutine"), (inspect.isgeneratorfunction, "a generator")):
        if is_kind(_plain(own)) and not is_kind(_plain(base)) and not _returns_iterator(base):
            return wrong, f"returns {what}: the contract's does not"
    try:
        wanted, given = _signature(base), _signature(own)
    except (TypeError, ValueError):
        return None
    return _unfit_call(wanted, given, by_name=not is_init)


def _unfit_call(wanted: inspect.Signature, given: inspect.Signature, *, by_name: bool) -> tuple[str, str] | None:
    kinds = inspect.Parameter
    positional = [
        p for p in wanted.parameters.values() if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    keywords = [p for p in wanted.parameters.values() if p.kind is kinds.KEYWORD_ONLY]
    for all_of_them in (True, False):
        passed = [p for p in positional if all_of_them or p.default is kinds.empty]
        named = {p.name: None for p in keywords if all_of_them or p.default is kinds.empty}
        try:
            given.bind(*passed, **named)
        except TypeError as error:
            return "incompatible-override", f"takes {given}, where the host passes {wanted}: {error}"
    if swapped := _swapped([p.name for p in positional], given):
        return "incompatible-override", swapped
    try:
        given.bind(**{p.name: None for p in [*positional, *keywords] if p.kind is not kinds.POSITIONAL_ONLY})
    except TypeError:
        if by_name:
            return "renamed-parameter", f"has other names in {given} than the contract in {wanted}"
    return None


def _swapped(wanted: list[str], given: inspect.Signature) -> str | None:
    """What is wrong where a parameter of the contract's name stands at another place: the call fits, and its values go
    to the wrong names."""
    kinds = inspect.Parameter
    places = [
        p.name for p in given.parameters.values() if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    for place, (own, name) in enumerate(zip(places, wanted, strict=False), start=1):
        if own != name and (own in wanted or name in places):
            order = ", ".join(wanted)
            return f"has `{own}` at place {place}, where the host passes `{name}`: the order is ({order})"
    return None


def _signature(member: Any) -> inspect.Signature:
    """Without `self` or `cls`."""
    signature = inspect.signature(_plain(member))
    parameters = list(signature.parameters.values())
    skipped = parameters if isinstance(member, staticmethod) else parameters[1:]
    if parameters and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
        skipped = parameters
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in skipped]
    return inspect.Signature(bare)


def _plain(member: Any) -> Any:
    return member.__func__ if isinstance(member, classmethod | staticmethod) else member


def _returns_iterator(member: Any) -> bool:
    annotation = str(inspect.get_annotations(_plain(member)).get("return", ""))
    return any(word in annotation for word in ("Iter", "Generator", "Awaitable", "Coroutine", "Any"))


def _written(name: str, base: Any) -> str:
    first = "cls" if isinstance(base, classmethod) else "self"
    decorator = "@classmethod " if isinstance(base, classmethod) else ""
    inner = ", ".join([first, *(str(parameter) for parameter in _signature(base).parameters.values())])
    return f"`{decorator}def {name}({inner})`"


def _newer(lineage: _Lineage, reach: Reach) -> Iterator[Finding]:
    declared = getattr(lineage.plugin, "contract", None)
    if not (isinstance(declared, tuple) and len(declared) == 2):
        return
    used = _used(lineage, reach)
    later = {name: version for name, version in since(lineage.entry.kind).items() if version > declared}
    for name in sorted(used & later.keys()):
        label, version = lineage.entry.label, later[name]
        message = f"{label} says `contract = {declared}` and uses {name}, which came with {version[0]}.{version[1]}"
        yield finding(
            "newer-member", label, message, f"Write `contract = {max(later[n] for n in used & later.keys())}`."
        )


def _used(lineage: _Lineage, reach: Reach) -> set[str]:
    """Names of the contract that a class surely uses: "Class" and "Class.member"."""
    used = {base.__name__ for base in lineage.bases}
    used |= {
        f"{base.__name__}.{name}" for _, name in lineage.own_members() for base in lineage.bases if name in vars(base)
    }
    record = lineage.plugin.capabilities
    if is_dataclass(record) and not isinstance(record, type):
        for one in fields(record):
            if one.default is not MISSING and getattr(record, one.name) != one.default:
                used.add(f"{type(record).__name__}.{one.name}")
    return used | reach.used()
