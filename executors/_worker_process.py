"""A worker process: what travels on its pipe, and the loop that serves it.

Started by `WorkerGroup` with `BOOTSTRAP` as ``python -c``, so that the driver's ``__main__`` is never imported again:
engines can be made in scripts without a ``__main__`` guard, in notebooks and from standard input.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import shutil
import signal
import socket
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

from dovetail.contracts.errors import PluginError
from dovetail.contracts.executor import Placement, Worker, WorkerSpec
from dovetail.contracts.step import StepPlan
from dovetail.executors._activity import ActivityLog
from dovetail.executors._cores import BoundThread

BOOTSTRAP = """\
import sys
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
sys.path[:] = pipe.recv()
from dovetail.executors._worker_process import main
main(pipe)
"""

READY = -1
"""Operation id of the reply that says that a worker has loaded."""

ORPHAN_CHECK_S = 1.0


class Launch(NamedTuple):
    """First message to a worker, after `sys.path`."""

    spec: bytes
    """A pickled `WorkerSpec`; pickled apart, so that the worker can report that it cannot read it."""
    placement: Placement
    driver_pid: int
    scratch: str
    """Directory of files for this group of workers; to be removed if the driver dies."""
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


def main(pipe: Connection) -> None:
    """Serves one worker until the driver ends the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the driver decides
    os.set_inheritable(pipe.fileno(), False)
    launch: Launch = pipe.recv()
    BoundThread(launch.cores).bind()  # before there are other threads, which then are bound as well
    threading.Thread(target=_exit_with_driver, args=(pipe.fileno(), launch), daemon=True).start()
    activity = ActivityLog(launch.scratch, launch.placement.rank)
    try:
        worker = _build(launch)
    except Exception as error:
        # Stays until the driver has read this: a process that ends now makes its peers fail too, and later
        # errors would hide the first.
        with contextlib.suppress(EOFError, OSError):
            _send(pipe, Reply(READY, None, describe(error)))
            pipe.recv_bytes()
        return
    try:
        with contextlib.suppress(EOFError, OSError):  # the pipe's end: _serve hands on no error of the worker
            _send(pipe, Reply(READY, None))
            activity.note("finished loading")
            _serve(pipe, worker, activity, replies_to_steps=launch.placement.answers)
    finally:
        worker.close()


def _build(launch: Launch) -> Worker:
    try:
        spec: WorkerSpec = pickle.loads(launch.spec)
    except Exception as error:
        raise PluginError(
            f"cannot read the worker spec: {error}. What travels to workers must be importable there: "
            "a class of an installed module or of a file named by path, not of a script or a notebook"
        ) from error
    worker = spec.create(launch.placement)
    try:
        worker.load()
    except BaseException:
        worker.close()
        raise
    return worker


def _serve(pipe: Connection, worker: Worker, activity: ActivityLog, replies_to_steps: bool) -> NoReturn:
    while True:
        op_id, *_ = operation = pickle.loads(pipe.recv_bytes())
        label = operation.label
        activity.note(f"began {label}")
        try:
            if isinstance(operation, Step):
                result = worker.execute(operation.plan)
                if replies_to_steps:
                    _send(pipe, Reply(op_id, result))
            else:
                _send(pipe, Reply(op_id, worker.call(operation.method, *operation.args)))
        except Exception as error:
            _send(pipe, Reply(op_id, None, describe(error)))
        activity.note(f"finished {label}")


def _send(pipe: Connection, reply: Reply) -> None:
    pipe.send_bytes(pickle.dumps(reply, pickle.HIGHEST_PROTOCOL))


def describe(error: Exception) -> RemoteError:
    """Packs an exception so that it always arrives, if need be as text only."""
    try:
        pickled: bytes | None = pickle.dumps(error)
        pickle.loads(pickled or b"")
    except Exception:
        pickled = None
    text = "".join(traceback.format_exception(error))
    return RemoteError(pickled, f"{type(error).__name__}: {error}", text, socket.gethostname())


def _exit_with_driver(fd: int, launch: Launch) -> None:
    """Ends this process when the driver is gone, even while a step hangs.

    Linux's parent-death signal is no use here: it fires when the thread that started the worker ends.
    """
    poll = select.poll()
    poll.register(fd, 0)  # hang-up only: reading is the main thread's business
    # A process forked off the driver may hold the pipe open beyond its death, hence the look at the parent.
    while not poll.poll(ORPHAN_CHECK_S * 1000) and os.getppid() == launch.driver_pid:
        pass
    shutil.rmtree(launch.scratch, ignore_errors=True)
    os._exit(1)
