import pytest
from collections.abc import Mapping
from dataclasses import dataclass
from dovetail.contracts.plugin import Plugin
from dovetail.testing.quirks import Quirk
from typing import Any, ClassVar


@dataclass(frozen=True)
class SuiteOf:
    name: str
    needs: str = ''
    def load(self) -> type[Suite]: ...

SUITES: Mapping[str, SuiteOf] = ...

class Suite:
    kind: ClassVar[str]
    plugin: ClassVar[Any]
    quirks: ClassVar[Mapping[str, Quirk]] = {}
    function_attributes: ClassVar[frozenset[str]] = frozenset()
    node: pytest.Item
    def __init_subclass__(cls, **kwargs: Any) -> None: ...
    @classmethod
    def reason_incomplete(cls) -> str | None: ...


class PluginSuite(Suite):
    plugin: ClassVar[type[Plugin]]
    def require(self, *names: str, **values: str | int) -> None: ...

def suites_of(kind: str) -> dict[str, type[Suite]]: ...
def reason_against(suite: type[Suite], plugin: Any) -> str | None: ...
def overrides(suite: type[Suite], base: type[Suite], name: str) -> bool: ...
