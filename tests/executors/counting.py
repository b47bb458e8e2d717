"""The executor `multiproc`, whose workers count their messages: they import every chosen plugin, so this file too."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from dovetail.executors.multiproc import MultiprocExecutor

_counts: Counter[str] = Counter()
_bytes: Counter[str] = Counter()


class CountingExecutor(MultiprocExecutor):
    """Its workers answer the call "messages" with calls and bytes by kind since the call before."""


def _counted(kind: str, function: Callable[..., Any], index: int) -> Callable[..., Any]:
    """`index`: which argument is the tensor."""

    def call(*args: Any, **keywords: Any) -> Any:
        _counts[kind] += 1
        _bytes[kind] += args[index].numel() * args[index].element_size()
        return function(*args, **keywords)

    return call


def _count_in_worker() -> None:
    import torch.distributed as dist

    from dovetail.contracts.step import StepResult
    from dovetail.executors.processes import worker as served
    from dovetail.nn import communicator
    from dovetail.worker.model_worker import ModelWorker

    for kind, name in (("all_reduce",) * 2, ("broadcast",) * 2, ("send", "isend"), ("receive", "recv")):
        setattr(dist, name, _counted(kind, getattr(dist, name), 0))
    communicator._gather = _counted("all_gather", communicator._gather, 1)
    execute, call, send = ModelWorker.execute, ModelWorker.call, served._send

    def counted_execute(self: Any, plan: Any) -> Any:
        _counts["plan"] += 1
        return execute(self, plan)

    def counted_send(connection: Any, reply: Any) -> None:
        _counts["result"] += isinstance(reply.value, StepResult)
        send(connection, reply)

    def answered_call(self: Any, method: str, *args: Any) -> Any:
        if method != "messages":
            return call(self, method, *args)
        found = {kind: (count, _bytes[kind]) for kind, count in _counts.items() if count}
        _counts.clear()
        _bytes.clear()
        return found

    ModelWorker.execute, ModelWorker.call, served._send = counted_execute, answered_call, counted_send


if sys.argv[0] == "-c":  # in a worker's process, not in the test's
    _count_in_worker()
