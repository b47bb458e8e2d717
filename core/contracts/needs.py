"""Needs: what the config asks of a plugin, compared with what the plugin declares. What it does not declare is refused.

The metadata of every field of a need names its rule: `compared` with one field of the kind's capabilities record, or
`informs`, where the plugin's own `check` or the contract decides::

    @dataclass(frozen=True)
    class ThingNeed:
        dtype: str = field(metadata=compared("dtypes", among, "{name} serves {has}, not {asked}; set model.dtype."))
        config: Mapping[str, Any] = field(metadata=informs("`check` reads it"))

The defaults of a capabilities record promise the least. So when a field is added to both records, the host refuses it
for all plugins that do not declare it yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from dovetail.contracts.plugin import Environment, Plugin, PluginOptions

_KEY = "need"
_BACKING = "backed by"

RUNS_ON = "{name} runs on {has}, not on {asked}."
SERVES_DTYPES = "{name} serves the dtypes {has}, not {asked}; set model.dtype."
"""Refusals of fields that several kinds have."""


class Rule(ABC):
    """How the host decides whether a plugin covers one field of a need."""

    @abstractmethod
    def against(self, name: str, can: Any, need: Any, asked: Any) -> str | None:
        """Returns one sentence where the capabilities `can` of the plugin `name` do not cover `asked`, the field's
        value in `need`: what the plugin lacks, and what to do. None where they cover it."""


@dataclass(frozen=True)
class Compared(Rule):
    """The field is compared with one field of the capabilities."""

    capability: str
    missing: Callable[[Any, Any], Any]
    """Takes what the plugin has and what is asked; returns the part that the plugin lacks, None where it has all."""
    sentence: str
    """The refusal, with the fields {name}, {has}, and {asked}: the part that the plugin lacks."""

    def against(self, name: str, can: Any, need: Any, asked: Any) -> str | None:
        has = getattr(can, self.capability)
        missing = self.missing(has, asked)
        if missing is None:
            return None
        if has == frozenset():
            return (
                f"{name} declares no {self.capability}, and {listed(missing)} is asked for: choose another, or declare "
                f"it in its `capabilities`."
            )
        return self.sentence.format(name=name, has=listed(has), asked=listed(missing))


@dataclass(frozen=True)
class Informs(Rule):
    """The field is not compared with a declaration."""

    reason: str
    """What decides about the field instead."""

    def against(self, name: str, can: Any, need: Any, asked: Any) -> str | None:
        """Returns None: never a refusal."""
        return None


def compared(capability: str, missing: Callable[[Any, Any], Any], sentence: str) -> Mapping[str, Rule]:
    """Metadata of a need's field that is compared with a field of the capabilities; see `Compared`."""
    return by_rule(Compared(capability, missing, sentence))


def informs(reason: str) -> Mapping[str, Rule]:
    """Metadata of a need's field that is not compared; `reason` says what decides about it."""
    return by_rule(Informs(reason))


def by_rule(rule: Rule) -> Mapping[str, Rule]:
    """Metadata of a need's field with a rule of its own."""
    return {_KEY: rule}


def among(has: frozenset[Any] | None, asked: Any) -> Any:
    """Returns `asked` unless it is one of `has`, or `has` is None (any); else None."""
    return None if has is None or asked in has else asked


def within(has: frozenset[Any] | None, asked: frozenset[Any]) -> frozenset[Any] | None:
    """Returns those of `asked` that are not in `has`; None if there are none, or `has` is None (any)."""
    return None if has is None else (asked - has) or None


def at_most(has: int | None, asked: int) -> int | None:
    """Returns `asked` if it is more than `has`; else, or if `has` is None (any number), None."""
    return None if has is None or asked <= has else asked


def multiple_of(has: int, asked: int) -> int | None:
    """Returns `asked` unless it is a multiple of `has`; else None."""
    return asked if asked % has else None


def flag(has: bool, asked: bool) -> bool | None:
    """Returns True if the capability is asked for and missing; else None."""
    return True if asked and not has else None


def listed(value: Any) -> str:
    """The value as messages show it."""
    return ", ".join(sorted(map(str, value))) if isinstance(value, frozenset | set) else str(value)


def rules_of(need: Any) -> Iterable[tuple[str, Rule | None]]:
    """Returns each field of a need, or of its class, with its rule; None where it has none, which the contracts' needs
    must not have."""
    return [(one.name, one.metadata.get(_KEY)) for one in fields(need)] if is_dataclass(need) else []


def uncovered(name: str, can: Any, need: Any) -> list[str]:
    """Returns one sentence for each part of `need` that the capabilities `can` of the plugin `name` do not cover."""
    answers = (
        rule.against(name, can, need, getattr(need, field_name))
        for field_name, rule in rules_of(need)
        if rule is not None
    )
    return [answer for answer in answers if answer is not None]


def reasons_against(plugin: type[Plugin], need: Any, options: PluginOptions, environment: Environment) -> list[str]:
    """Returns why a plugin cannot serve a need: what its capabilities lack, else what its `check` returns. Empty: it
    can.

    Raises `TypeError` for a `check` that does not return a list of strings.
    """
    lacks = uncovered(plugin.__name__, plugin.capabilities, need)
    return lacks or _sentences(plugin, plugin.check(need, options, environment))


def backed_by(member: str) -> Mapping[str, str]:
    """Metadata of a capability that a class must back: by deriving from the abstract class `member` of the kind's
    contract, or by overriding the method `member` of the kind's base class."""
    return {_BACKING: member}


def unbacked(plugin: type[Plugin]) -> list[str]:
    """Returns one sentence for each capability that a plugin declares and its class does not back (`backed_by`)."""
    can = plugin.capabilities
    lines = []
    for one in fields(can) if is_dataclass(can) else ():
        member = one.metadata.get(_BACKING)
        if member is None or getattr(can, one.name) == one.default or _backs(plugin, member):
            continue
        how = f"derive from {member}" if member[0].isupper() else f"override `{member}`"
        lines.append(
            f"{plugin.__qualname__} declares the capability {one.name}, and does not {how}: do so, or do not declare it"
        )
    return lines


def _backs(plugin: type[Plugin], member: str) -> bool:
    if member[0].isupper():
        return any(base.__name__ == member and _is_contract(base) for base in plugin.__mro__)
    owner = next((base for base in plugin.__mro__ if member in vars(base)), None)
    return owner is not None and not _is_contract(owner)


def _is_contract(owner: type) -> bool:
    return owner.__module__.startswith(f"{__package__}.")


def _sentences(plugin: type[Plugin], returned: object) -> list[str]:
    """What a plugin's `check` returned, which nobody has looked at yet."""
    if not isinstance(returned, list | tuple) or not all(isinstance(sentence, str) for sentence in returned):
        raise TypeError(
            f"{plugin.__qualname__}.check returned {returned!r}: return a list of sentences, empty where the plugin "
            "can serve the need"
        )
    return list(returned)
