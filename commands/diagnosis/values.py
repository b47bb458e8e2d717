"""What a class gets wrong about the types of its values: class variables and capabilities."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import UnionType
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from dovetail.commands.diagnosis.finding import Finding, finding
from dovetail.contracts.plugin import Plugin
from dovetail.registry.entries import Entry
from dovetail.registry.loading import base_class, class_facts

_EXAMINED_ELSEWHERE = frozenset({"contract", "capabilities", "stability", "Options"})


def examine_variables(entry: Entry, plugin: type[Plugin]) -> Iterator[Finding]:
    """Class variables of the contract whose values have another type, as far as plain types show."""
    base = base_class(entry.kind)
    hints = get_type_hints(base)
    for name in class_facts(base):
        if name in _EXAMINED_ELSEWHERE or not hasattr(plugin, name) or get_origin(hints[name]) is not ClassVar:
            continue
        value = getattr(plugin, name)
        wanted = _unlike(get_args(hints[name])[0], value)
        if wanted is not None:
            yield finding("variable-type", entry.label, f"{entry.label}: its {name} is {value!r}, no {wanted}")


def examine_capabilities(entry: Entry, plugin: type[Plugin]) -> Iterator[Finding]:
    """Capabilities whose values have another type than their fields, as far as plain types show, and numbers that
    nothing can have."""
    record: Any = plugin.capabilities
    if not dataclasses.is_dataclass(record):
        return
    hints = get_type_hints(type(record))
    for one in dataclasses.fields(record):
        value = getattr(record, one.name)
        wanted = _unlike(hints[one.name], value)
        if wanted is not None:
            message = f"{entry.label}: its capability {one.name} is {value!r}, no {wanted}"
            yield finding("capability-type", entry.label, message)
        elif (number := _too_small(value)) is not None:
            shown = repr(value) if isinstance(value, int) else f"{value!r}, with {number} in it"
            message = f"{entry.label}: its capability {one.name} is {shown}: ranks and sizes are at least 1"
            yield finding("capability-value", entry.label, message)


def _too_small(value: object) -> int | None:
    """A number below 1 that a capability is, or has in a set. All numbers of the records are ranks or sizes."""
    numbers = value if isinstance(value, frozenset) else (value,)
    return next((each for each in numbers if isinstance(each, int) and not isinstance(each, bool) and each < 1), None)


def _unlike(hint: Any, value: object) -> str | None:
    """The names of the types of a hint where the value is surely of none of them. A bool is no number."""
    origin = get_origin(hint)
    allowed = get_args(hint) if origin is None or not isinstance(origin, type) or origin is UnionType else (hint,)
    wanted = [get_origin(each) or each for each in allowed or (hint,)]
    if not all(isinstance(each, type) for each in wanted):
        return None
    is_wanted = isinstance(value, tuple(wanted)) and (not isinstance(value, bool) or bool in wanted or object in wanted)
    return None if is_wanted else " or ".join(each.__name__ for each in wanted)
