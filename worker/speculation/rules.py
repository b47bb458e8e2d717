"""The acceptance rules of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dovetail.config.resolved import Component, ResolvedSpeculation
from dovetail.contracts.operators import Operators
from dovetail.contracts.speculation import AcceptanceRule
from dovetail.registry.bootstrap import LoadedPlugins


@dataclass(frozen=True)
class Rules:
    """Fresh instances."""

    default: AcceptanceRule
    others: Mapping[str, AcceptanceRule]
    """By the name that requests give."""


def create_rules(section: ResolvedSpeculation, plugins: LoadedPlugins, operators: Operators) -> Rules:
    """Those of a config, which may verify with `operators`."""

    def create(component: Component) -> AcceptanceRule:
        rule: AcceptanceRule = plugins.create(component)
        rule.use_operators(operators)
        return rule

    return Rules(create(section.acceptance), {name: create(rule) for name, rule in section.rules.items()})
