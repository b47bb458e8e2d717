"""Messages between the driver and a worker's process, each pickled. The first is the driver's `sys.path`, or None where
the worker keeps its own."""

from __future__ import annotations

import pickle
import socket
import traceback
from typing import Any, NamedTuple

from dovetail.contracts.executor import Placement
from dovetail.contracts.step import StepPlan

READY = -1
"""Operation id of a worker's reply that it has loaded."""
STATUS = -2
"""Operation id of what a worker reports of itself (`Report`), which nobody asked for."""


class Launch(NamedTuple):
    """The second message to a worker: what to build."""

    spec: bytes
    """A pickled `WorkerSpec`; pickled apart, so that the worker can report that it cannot read it."""
    placement: Placement
    driver_pid: int
    scratch: str | None
    """Directory of files for the executor's workers; a worker removes it if the driver dies. None on another
    machine."""
    cores: tuple[int, ...] | None
    """Cores to bind the worker to; None: any."""


class Step(NamedTuple):
    """Run a plan. The answering rank replies; other ranks reply only if the step fails."""

    op_id: int
    plan: StepPlan

    @property
    def label(self) -> str:
        """Name of the operation in messages."""
        return f"step {self.plan.step_id}"


class Call(NamedTuple):
    """Call an operation of the worker. Every rank replies."""

    op_id: int
    method: str
    args: tuple[Any, ...]

    @property
    def label(self) -> str:
        """Name of the operation in messages."""
        return f"call {self.method!r}"


class RemoteError(NamedTuple):
    """A pickled exception for the driver."""

    pickled: bytes | None
    """None where the exception does not survive pickling."""
    summary: str
    traceback: str
    host: str


class Reply(NamedTuple):
    """An answer to one operation."""

    op_id: int
    value: Any
    error: RemoteError | None = None


def describe(error: Exception) -> RemoteError:
    """Packs an exception so that it always arrives, as text only where it cannot be pickled."""
    try:
        pickled: bytes | None = pickle.dumps(error)
        pickle.loads(pickled or b"")
    except Exception:
        pickled = None
    text = "".join(traceback.format_exception(error))
    return RemoteError(pickled, f"{type(error).__name__}: {error}", text, socket.gethostname())
