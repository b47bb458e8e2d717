"""What is asked of a plugin, compared with what it declares. A need that nothing answers is a refusal.

Every field of a need says in its metadata how it is answered: `compared` with one field of the kind's capabilities
record, or `informs`, where no declaration could answer it and the plugin's own `check` or the contract does::

    @dataclass(frozen=True)
    class ThingNeed:
        dtype: str = field(metadata=compared("dtypes", among, "{name} serves {has}, not {asked}; set model.dtype."))
        config: Mapping[str, Any] = field(metadata=informs("`check` reads it"))

The defaults of a capabilities record promise the least, so a field that is added to both later is refused for all
plugins that do not know it yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from dovetail.contracts.plugin import Environment, Plugin, PluginOptions

_KEY = "need"

RUNS_ON = "{name} runs on {has}, not on {asked}."
SERVES_DTYPES = "{name} serves the dtypes {has}, not {asked}; set model.dtype."
"""Sentences of fields that several kinds have."""


class Rule(ABC):
    """How one field of a need is answered."""

    @abstractmethod
    def against(self, name: str, can: Any, need: Any, asked: Any) -> str | None:
        """One sentence where the capabilities `can` of the plugin `name` do not cover `asked`, the field's value in
        `need`: what the plugin lacks, and what to do. None where they do."""


@dataclass(frozen=True)
class Compared(Rule):
    """Compared with one field of the capabilities."""

    capability: str
    missing: Callable[[Any, Any], Any]
    """From what the plugin has and what is asked to the part that it lacks; None where it lacks nothing."""
    sentence: str
    """With the fields {name}, {has} and {asked}, the part that is missing."""

    def against(self, name: str, can: Any, need: Any, asked: Any) -> str | None:
        """As `Rule.against`."""
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
    """Answered by no declaration."""

    reason: str
    """Who answers it instead."""

    def against(self, name: str, can: Any, need: Any, asked: Any) -> str | None:
        """Nothing."""
        return None


def compared(capability: str, missing: Callable[[Any, Any], Any], sentence: str) -> Mapping[str, Rule]:
    """Metadata of a need's field that is compared with a field of the capabilities; see `Compared`."""
    return by_rule(Compared(capability, missing, sentence))


def informs(reason: str) -> Mapping[str, Rule]:
    """Metadata of a need's field that is not compared; `reason` says who answers it."""
    return by_rule(Informs(reason))


def by_rule(rule: Rule) -> Mapping[str, Rule]:
    """Metadata of a need's field that is answered by a rule of its own."""
    return {_KEY: rule}


def among(has: frozenset[Any] | None, asked: Any) -> Any:
    """What is missing: nothing (None) if `asked` is one of `has`, or if `has` is None (any)."""
    return None if has is None or asked in has else asked


def within(has: frozenset[Any] | None, asked: frozenset[Any]) -> frozenset[Any] | None:
    """What is missing: those of `asked` that are not in `has`; nothing (None) if `has` is None (any)."""
    return None if has is None else (asked - has) or None


def at_most(has: int | None, asked: int) -> int | None:
    """What is missing: nothing (None) if `asked` is no more than `has`, or if `has` is None (any number)."""
    return None if has is None or asked <= has else asked


def multiple_of(has: int, asked: int) -> int | None:
    """What is missing: nothing (None) if `asked` is a multiple of `has`."""
    return asked if asked % has else None


def flag(has: bool, asked: bool) -> bool | None:
    """What is missing: True if it is asked for and not there, else nothing (None)."""
    return True if asked and not has else None


def listed(value: Any) -> str:
    """As sentences show it."""
    return ", ".join(sorted(map(str, value))) if isinstance(value, frozenset | set) else str(value)


def rules_of(need: Any) -> Iterable[tuple[str, Rule | None]]:
    """Each field of a need, or of its class, with its rule; None where it has none, which no need of the contracts
    may have."""
    return [(one.name, one.metadata.get(_KEY)) for one in fields(need)] if is_dataclass(need) else []


def uncovered(name: str, can: Any, need: Any) -> list[str]:
    """One sentence for each part of `need` that the capabilities `can` of the plugin `name` do not cover."""
    answers = (
        rule.against(name, can, need, getattr(need, field_name))
        for field_name, rule in rules_of(need)
        if rule is not None
    )
    return [answer for answer in answers if answer is not None]


def reasons_against(plugin: type[Plugin], need: Any, options: PluginOptions, environment: Environment) -> list[str]:
    """Why a plugin cannot serve a need: what its capabilities lack, or else what its `check` says. Empty: it can."""
    return uncovered(plugin.__name__, plugin.capabilities, need) or list(plugin.check(need, options, environment))
