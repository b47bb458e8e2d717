import pluggy
from collections.abc import Iterable, Iterator
from dovetail.testing.suite import Suite
from typing import Any, ClassVar

PATIENCE_S = 10.0
CONFIG: dict[str, Any] = {'model': {'path': './model', 'dtype': 'float32'}, 'cache': {'block_size': 16, 'num_blocks': 100}, 'telemetry': [], 'speculative': None}
PLUGINS = {'executor': 'dovetail.executors.cpu:CPUExecutor', 'scheduler': 'dovetail.schedulers.fcfs:FCFSScheduler', 'attention': '/somewhere/mine.py:Mine'}
ODD_IDS = ('0', '', 'chatcmpl-6c1f', 'a b/c', 'ünïcode', '-1')
ODD_PARAMS = ...

class RecordedControl:
    def __init__(self) -> None: ...
    calls: list[tuple[str, tuple[str, ...]]]
    def hold(self, request_ids: str | Iterable[str]) -> None: ...
    def resume(self, request_ids: str | Iterable[str]) -> None: ...


class HooksSuite(Suite):
    kind: ClassVar[str] = 'hooks'
    plugin: ClassVar[object]
    def manager(self) -> Iterator[pluggy.PluginManager]: ...
