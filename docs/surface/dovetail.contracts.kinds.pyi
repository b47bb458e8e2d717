from dataclasses import dataclass
from dovetail.contracts.plugin import ContractVersion


@dataclass(frozen=True)
class Kind:
    name: str
    base: str
    version: ContractVersion
    summary: str
    need: str | None = None
    @property
    def group(self) -> str: ...

KINDS: dict[str, Kind] = ...
HOOKS_VERSION = ...
HOOKS_GROUP = f'dovetail.hooks.v{HOOKS_VERSION.major}'
DEFAULTS_GROUP = 'dovetail.defaults'
CONFIG_NAMES_GROUP = 'dovetail.config_names'
NAMES_GROUP = 'dovetail.names'
TEMPLATES_GROUP = 'dovetail.templates'
