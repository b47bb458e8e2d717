from collections.abc import Mapping
from dovetail.contracts.pooling import Pooler
from dovetail.testing.suite import PluginSuite
from typing import Any, ClassVar


class PoolerSuite(PluginSuite):
    kind: ClassVar[str] = 'pooler'
    plugin: ClassVar[type[Pooler]]
    options: ClassVar[Mapping[str, Any]] = {}
    hidden_size: ClassVar[int] = 16
    num_labels: ClassVar[int] = 3
    @property
    def tasks(self) -> list[str]: ...
    def create(self, task: str) -> Pooler: ...
