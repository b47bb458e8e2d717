from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dovetail.contracts.executor import Executor, ExecutorNeed
from dovetail.testing.suite import PluginSuite
from dovetail.testing.toy_worker import ToySpec
from pathlib import Path
from typing import Any, ClassVar


class ExecutorSuite(PluginSuite):
    kind: ClassVar[str] = 'executor'
    plugin: ClassVar[type[Executor]]
    options: ClassVar[Mapping[str, Any]] = {}
    device_type: ClassVar[str] = 'cpu'
    tensor_parallel: ClassVar[int] = 1
    pipeline_parallel: ClassVar[int] = 1
    @property
    def num_ranks(self) -> int: ...
    @property
    def need(self) -> ExecutorNeed: ...
    def with_two_stages(self) -> ExecutorSuite: ...
    def create(self, spec: ToySpec | None = None) -> Executor: ...
    @contextmanager
    def started(self, spec: ToySpec | None = None) -> Iterator[Executor]: ...
    def nothing_left(self) -> Iterator[None]: ...
    def resources(self) -> dict[str, set[Any]]: ...


class ProcessExecutorSuite(ExecutorSuite):
    tensor_parallel: ClassVar[int] = 2
    def fifo(self, tmp_path: Path) -> Path: ...
