"""The acceptance rules of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dovetail.config.resolved import Component, ResolvedSpeculation
from dovetail.contracts.operators import Operators
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.speculation import AcceptanceRule
from dovetail.registry.bootstrap import LoadedPlugins


@dataclass(frozen=True)
class Rules:
    """Instances of one engine."""

    default: AcceptanceRule
    """Judges requests that name none of `others`."""
    others: Mapping[str, AcceptanceRule] = field(default_factory=dict)
    """By the name that requests give (`SamplingParams.acceptance`)."""

    def of(self, sampling: SamplingParams) -> AcceptanceRule:
        """The rule that judges a request's drafts."""
        return self.default if sampling.acceptance is None else self.others[sampling.acceptance]


def create_rules(section: ResolvedSpeculation, plugins: LoadedPlugins, operators: Operators) -> Rules:
    """Fresh instances of a config's rules, which may verify with `operators`."""

    def create(component: Component) -> AcceptanceRule:
        rule: AcceptanceRule = plugins.create(component)
        rule.use_operators(operators)
        return rule

    return Rules(create(section.acceptance), {name: create(rule) for name, rule in section.rules.items()})
