from collections.abc import Mapping
from dovetail.contracts.router import Router
from dovetail.testing.router_traffic import SimulatedHost
from dovetail.testing.suite import PluginSuite
from typing import Any, ClassVar


class RouterSuite(PluginSuite):
    kind: ClassVar[str] = 'router'
    plugin: ClassVar[type[Router]]
    options: ClassVar[Mapping[str, Any]] = {}
    num_replicas: ClassVar[int] = 4
    def create(self, num_replicas: int | None = None) -> Router: ...
    def host(self) -> SimulatedHost: ...
