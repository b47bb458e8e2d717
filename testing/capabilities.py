"""What a suite asks of a plugin's declarations, and a plugin that declares more."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dovetail.contracts.plugin import Plugin

UNDECLARED = "undeclared"
"""Property of a test that was skipped for want of a capability: name and value of it."""


@dataclass(frozen=True)
class Capability:
    """One thing that a plugin may declare in its record of capabilities."""

    name: str
    """Field of the record."""
    value: str | int | None = None
    """For a field that is a set: the member; for one that is a number: the least. None for a field that is a bool."""

    def __str__(self) -> str:
        return self.name if self.value is None else f"{self.name} {self.value}"

    def is_declared_by(self, plugin: type[Plugin]) -> bool:
        """Whether the plugin's record has it. A set or number of None declares all."""
        declared = vars(plugin.capabilities)[self.name]
        if self.value is None:
            return bool(declared)
        return declared is None or (declared >= self.value if isinstance(self.value, int) else self.value in declared)

    def added_to(self, plugin: type[Plugin]) -> type[Plugin]:
        """A subclass that declares it besides."""
        declared = vars(plugin.capabilities)[self.name]
        value: Any = True if self.value is None else self.value
        if isinstance(self.value, str):
            value = frozenset({*declared, self.value})
        capabilities = replace(plugin.capabilities, **{self.name: value})
        return type(plugin.__name__, (plugin,), {"__module__": plugin.__module__, "capabilities": capabilities})
