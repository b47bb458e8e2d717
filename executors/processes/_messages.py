"""What travels between the driver and a worker's process, each message pickled; before them `sys.path`, or None where
the worker is to keep its own."""

from __future__ import annotations

import pickle
import socket
import traceback
from typing import Any, NamedTuple

from dovetail.contracts.executor import Placement
from dovetail.contracts.step import StepPlan

READY = -1
"""Operation id of the reply that says that a worker has loaded."""


class Launch(NamedTuple):
    """First message to a worker."""

    spec: bytes
    """A pickled `WorkerSpec`; pickled apart, so that the worker can report that it cannot read it."""
    placement: Placement
    driver_pid: int
    scratch: str | None
    """Directory of files for this group of workers; to be removed if the driver dies. None on another machine."""
    cores: tuple[int, ...] | None
    """Cores to compute on; None: any."""


class Step(NamedTuple):
    """Run a plan. The rank that answers replies; other ranks do so only if it fails."""

    op_id: int
    plan: StepPlan

    @property
    def label(self) -> str:
        """For messages."""
        return f"step {self.plan.step_id}"


class Call(NamedTuple):
    """Call the worker. Every rank replies."""

    op_id: int
    method: str
    args: tuple[Any, ...]

    @property
    def label(self) -> str:
        """For messages."""
        return f"call {self.method!r}"


class RemoteError(NamedTuple):
    """An exception on its way to the driver."""

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
    """Packs an exception so that it always arrives, if need be as text only."""
    try:
        pickled: bytes | None = pickle.dumps(error)
        pickle.loads(pickled or b"")
    except Exception:
        pickled = None
    text = "".join(traceback.format_exception(error))
    return RemoteError(pickled, f"{type(error).__name__}: {error}", text, socket.gethostname())
