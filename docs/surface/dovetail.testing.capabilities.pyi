from dataclasses import dataclass
from dovetail.contracts.plugin import Plugin

UNDECLARED = 'undeclared'

@dataclass(frozen=True)
class Capability:
    name: str
    value: str | int | None = None
    def is_declared_by(self, plugin: type[Plugin]) -> bool: ...
    def added_to(self, plugin: type[Plugin]) -> type[Plugin]: ...
