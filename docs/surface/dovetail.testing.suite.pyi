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
    node: pytest.Item
    def __init_subclass__(cls, **kwargs: Any) -> None: ...


class PluginSuite(Suite):
    plugin: ClassVar[type[Plugin]]
    def require(self, *names: str, **values: str | int) -> None: ...

def reason_against(suite: type[Suite], plugin: Any) -> str | None: ...
