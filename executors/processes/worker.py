"""The main loop of a worker's process: serves a connection to the driver."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import shutil
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import NoReturn

from dovetail.contracts.errors import PluginError
from dovetail.contracts.executor import Worker, WorkerSpec
from dovetail.executors._cores import BoundThread
from dovetail.executors.processes._activity import ActivityLog
from dovetail.executors.processes._messages import READY, STATUS, Launch, Reply, Step, describe
from dovetail.executors.processes._status import StatusReporter

STOP_S = 5.0
"""Seconds to wait for a process to end, at each stage: asked, terminated, killed."""
_ORPHAN_CHECK_S = 1.0
_STOP_ASKED = select.POLLRDHUP if sys.platform == "linux" else 0
"""Poll event: the driver sends no more messages. Systems other than Linux report only the end of both directions."""
_SENDS = threading.Lock()
"""Answers and reports are sent by two threads."""


def serve(connection: Connection) -> None:
    """Builds the worker that the driver describes, and runs its operations, until the driver ends the connection.

    Call it once, in the main thread of a process of the worker's own, where dovetail is importable and torch was not
    imported yet: the environment (`ProcessExecutor.launch`) decides on threads. It takes SIGINT, which the driver
    handles, and SIGUSR1; a process whose driver is gone ends at once, or after 5 seconds where the connection leads
    to another machine.
    """
    path = connection.recv()
    if path is not None:
        sys.path[:] = path
    serve_launch(connection)


def serve_launch(connection: Connection) -> None:
    """`serve` behind the first message."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the driver decides
    os.set_inheritable(connection.fileno(), False)
    launch: Launch = connection.recv()
    if launch.cores is not None:
        BoundThread(launch.cores).bind()  # before there are other threads, which then are bound as well
    threading.Thread(target=_exit_with_driver, args=(connection.fileno(), launch), daemon=True).start()
    activity = ActivityLog(launch.scratch, launch.placement.rank)
    try:
        worker = _build(launch)
    except Exception as error:
        # Stays until the driver has read this: a process that ends now makes its peers fail too, and later
        # errors would hide the first.
        with contextlib.suppress(EOFError, OSError):
            _send(connection, Reply(READY, None, describe(error)))
            connection.recv_bytes()
        return
    try:
        with contextlib.suppress(EOFError, OSError):  # the connection's end: _serve hands on no error of the worker
            _send(connection, Reply(READY, None))
            activity.note("finished loading")
            status = StatusReporter(launch.placement.device, lambda report: _send(connection, Reply(STATUS, report)))
            status.start()
            _serve(connection, worker, activity, status, replies_to_steps=launch.placement.answers)
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


def _serve(
    connection: Connection, worker: Worker, activity: ActivityLog, status: StatusReporter, replies_to_steps: bool
) -> NoReturn:
    while True:
        op_id, *_ = operation = pickle.loads(connection.recv_bytes())
        label = operation.label
        activity.note(f"began {label}")
        try:
            if isinstance(operation, Step):
                status.step_begins()
                result = worker.execute(operation.plan)
                status.step_ends()
                if replies_to_steps:
                    _send(connection, Reply(op_id, result))
            else:
                _send(connection, Reply(op_id, worker.call(operation.method, *operation.args)))
        except Exception as error:
            status.step_ends()
            _send(connection, Reply(op_id, None, describe(error)))
        activity.note(f"finished {label}")


def _send(connection: Connection, reply: Reply) -> None:
    data = pickle.dumps(reply, pickle.HIGHEST_PROTOCOL)
    with _SENDS:
        connection.send_bytes(data)


def _exit_with_driver(fd: int, launch: Launch) -> None:
    """Ends this process when the driver is gone, even while a step hangs.

    Linux's parent-death signal is no use here: it fires when the thread that started the worker ends.
    """
    # A process forked off the driver may hold the connection open beyond its death, hence the look at the parent.
    is_child = os.getppid() == launch.driver_pid
    poll = select.poll()
    poll.register(fd, _STOP_ASKED)  # no POLLIN: reading is the main thread's business
    while not is_child or os.getppid() == launch.driver_pid:
        events = dict(poll.poll(_ORPHAN_CHECK_S * 1000)).get(fd, 0)
        if events & ~_STOP_ASKED:
            break  # both directions have ended
        if events:
            # A driver that asked this process to stop, or one on another machine that is gone: who can say.
            poll.modify(fd, 0)
            poll.poll(STOP_S * 1000)
            break
    if launch.scratch is not None:
        shutil.rmtree(launch.scratch, ignore_errors=True)
    os._exit(1)
