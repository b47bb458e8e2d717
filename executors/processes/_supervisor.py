"""Supervises worker processes: sends operations to all, collects answers, and ends all when one dies or hangs."""

from __future__ import annotations

import dataclasses
import operator
import os
import pickle
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from dovetail.contracts.errors import WorkerError
from dovetail.contracts.executor import Placement, RankStatus
from dovetail.contracts.step import StepPlan, StepResult
from dovetail.executors.processes._activity import look_at, suspects
from dovetail.executors.processes._deadline import DeadlineWatch
from dovetail.executors.processes._messages import READY, STATUS, Call, Launch, Reply, Step
from dovetail.executors.processes._operations import Failure, Operation, Timeouts, remote_failure
from dovetail.executors.processes._processes import WorkerProcesses
from dovetail.executors.processes._status import Report

DEATH_CHECK_S = 0.5
"""Seconds between checks of the processes. A death usually shows at once, as the end of a pipe; but a child process of
the worker may hold the pipe open."""
ERROR_GRACE_S = 0.5
"""Seconds to wait, after an error, for a death that explains it: peers of a killed worker fail as well."""
CALL_GRACE_S = 10.0
"""Seconds to wait, after one rank's error in a call, for the answers of the others."""


class WorkerSupervisor:
    """Talks to one process per placement; a thread reads all connections.

    Operations reach every rank in the same order. When a process dies, a step fails, or an operation exceeds its
    timeout, all processes are killed; then all futures fail with `WorkerError`, and so does every later operation. In a
    process that was forked off the owner's, every operation fails and `stop` does nothing.
    """

    def __init__(
        self,
        placements: Sequence[Placement],
        workers: WorkerProcesses,
        scratch: str,
        timeouts: Timeouts,
    ):
        """`workers`: the connected processes. `scratch`: a directory of this executor alone."""
        self._timeouts = timeouts
        self._placements = placements
        self._scratch = scratch
        self._owner_pid = os.getpid()
        self._workers = workers
        self._reader = threading.Thread(target=self._read, name="dovetail-workers", daemon=True)
        self._deadlines = DeadlineWatch(self._under_way, self._note_hang, self._note_unwatched)
        self._send_lock = threading.RLock()  # order on the pipes; held for long where a pipe is full
        self._state_lock = threading.RLock()  # re-entrant: garbage collection may call stop() anywhere
        self._pending: dict[int, Operation] = {}
        self._sending: Operation | None = None  # its answer may come while a rank that halts has not taken it yet
        self._reports: dict[int, tuple[float, Report]] = {}
        """By rank, when the process last reported, and what."""
        self._num_operations = 0
        self._error: Failure | None = None  # the first; a death within the grace outranks it
        self._error_deadline = 0.0
        self._ended: list[int] = []  # ranks, in the order in which their ends were noticed
        self._next_death_check = 0.0
        self._hang: Failure | None = None
        self._failure: Failure | None = None
        self._is_stopping = False

    def start(self, spec: bytes, cores: Sequence[tuple[int, ...] | None]) -> Future[list[None]]:
        """Makes every process build and load its worker, bound to its `cores`; the future is done when all have
        loaded."""
        operation = Operation("start", self._all_ranks(), self._timeouts.start_s)
        self._register(READY, operation)
        self._reader.start()
        self._deadlines.start()
        path = [entry or os.getcwd() for entry in sys.path]
        for rank, placement in enumerate(self._placements):
            is_local = self._workers.processes[rank].local_pid is not None
            scratch = self._scratch if is_local else None
            _send(self._workers.pipes[rank], pickle.dumps(path if is_local else None))
            _send(
                self._workers.pipes[rank], pickle.dumps(Launch(spec, placement, self._owner_pid, scratch, cores[rank]))
            )
        return operation.future

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """Sends a plan to every rank; the future has the answering rank's result."""
        operation = Operation(
            f"step {plan.step_id}",
            {self._placements[0].layout.answering_rank},
            self._timeouts.step_s,
            "executor.step_timeout_s",
            finish=operator.itemgetter(0),
        )
        return self._submit(operation, lambda op_id: Step(op_id, plan))

    def call(self, method: str, args: tuple[Any, ...]) -> Future[list[Any]]:
        """Sends a call to every rank; the future has all answers, or the lowest rank's error, once all have
        answered. A worker's `WorkerError`, which says that its process cannot go on, ends all of them."""
        operation = Operation(f"call {method!r}", self._all_ranks(), self._timeouts.start_s, outlives_errors=True)
        return self._submit(operation, lambda op_id: Call(op_id, method, args))

    def status(self) -> tuple[RankStatus, ...]:
        """What is known of each rank now. From any thread; waits for nobody."""
        return tuple(self._status(placement) for placement in self._placements)

    def _status(self, placement: Placement) -> RankStatus:
        process, found = self._workers.processes[placement.rank], self._reports.get(placement.rank)
        status = RankStatus(
            rank=placement.rank,
            stage=placement.stage,
            tensor_rank=placement.tensor_rank,
            node=process.node,
            device=placement.device,
            pid=process.local_pid,
            is_alive=not self._workers.is_dead(placement.rank),
        )
        if found is None:
            return status
        when, report = found
        return dataclasses.replace(status, silent_s=time.monotonic() - when, **report._asdict())

    @property
    def is_ours(self) -> bool:
        """False in a fork of the driver, which inherits this object but not the workers."""
        return os.getpid() == self._owner_pid

    def stop(self, politely: bool = True) -> None:
        """Ends all processes: asks them to stop, then terminates, then kills them. Idempotent; takes seconds at
        worst."""
        if not self.is_ours:
            return
        with self._state_lock:
            if self._is_stopping:
                return
            self._is_stopping = True
            if self._failure is None:
                self._workers.shut_pipes(socket.SHUT_WR)
        if politely and not self._workers.any_stopped():
            self._workers.wait()
            self._workers.terminate()
        self._workers.kill()
        self._deadlines.stop()
        if self._reader.ident is None:
            self._workers.close()
        elif self._reader is not threading.current_thread():
            self._reader.join()

    # Asking

    def _all_ranks(self) -> set[int]:
        return {placement.rank for placement in self._placements}

    def _submit(self, operation: Operation, message: Callable[[int], Step | Call]) -> Future[Any]:
        if not self.is_ours:  # before any lock, which a thread may hold that was not copied
            raise WorkerError(
                f"the workers belong to process {self._owner_pid}, and this is process {os.getpid()}, forked off it:"
                " make an executor in this process, or start processes by spawn instead of fork"
            )
        with self._send_lock:
            self._num_operations += 1
            data = pickle.dumps(message(self._num_operations), pickle.HIGHEST_PROTOCOL)
            self._register(self._num_operations, operation)
            self._sending = operation
            for pipe in self._workers.pipes:
                _send(pipe, data)
            self._sending = None
        return operation.future

    def _register(self, op_id: int, operation: Operation) -> None:
        operation.future.set_running_or_notify_cancel()  # what is under way cannot be cancelled
        with self._state_lock:
            if self._failure is not None:
                raise self._failure.error()
            if self._is_stopping:
                raise WorkerError("this executor was shut down: create a new one")
            self._pending[op_id] = operation

    # The thread of the deadline

    def _under_way(self) -> Operation | None:
        with self._state_lock:
            return next(iter(self._pending.values()), self._sending)

    def _note_hang(self, operation: Operation) -> None:
        seen = look_at(self._scratch, self._workers.processes, self._workers.labels)
        guilty = suspects(seen, operation.waiting) or seen
        others = [str(sighting) for sighting in seen if sighting is not guilty[0]]
        message = (
            f"worker {guilty[0]}, and {operation.label} was not done after {operation.timeout_s:g} s"
            f" ({operation.option}; raise it if that is to be expected); all workers were stopped"
        )
        self._give_up(operation, Failure(guilty[0].rank, "; ".join([message, *others])))

    def _note_unwatched(self, error: Exception) -> None:
        """Ends the workers where the deadline watch itself failed: a hang would go unnoticed."""
        operation = self._under_way()
        if operation is not None:
            message = f"watching the workers during {operation.label} failed: {error!r}; all workers were stopped"
            self._give_up(operation, Failure(None, message, error))

    def _give_up(self, operation: Operation, failure: Failure) -> None:
        """Ends the workers, unless the operation was done meanwhile."""
        with self._state_lock:
            if self._is_stopping or operation not in (*self._pending.values(), self._sending):
                return
            self._hang = failure
            self._workers.shut_pipes(socket.SHUT_RDWR)  # wakes the reader, which does the rest

    # The reader's thread

    def _read(self) -> None:
        try:
            failure = self._watch()
        except Exception as error:  # futures must not wait for ever, whatever goes wrong here
            failure = Failure(None, f"reading the workers' answers failed: {error!r}", error)
        if failure is not None:
            with self._state_lock:
                self._failure = failure
            self._workers.shut_pipes(socket.SHUT_RDWR)
            self._workers.kill()
        with self._send_lock, self._state_lock:  # no thread may use a descriptor that is closed, and perhaps reused
            self._workers.close()
        self._fail_pending(failure or Failure(None, "the executor was shut down before this was done"))

    def _watch(self) -> Failure | None:
        """Reads until an operation fails, or all processes have stopped as asked."""
        failure = None
        with selectors.DefaultSelector() as selector:
            for rank, pipe in enumerate(self._workers.pipes):
                selector.register(pipe, selectors.EVENT_READ, rank)
            while failure is None and len(self._ended) < len(self._placements):
                self._read_once(selector)
                failure = None if self._is_stopping else self._find_failure()
        return failure

    def _read_once(self, selector: selectors.BaseSelector) -> None:
        ready = selector.select(DEATH_CHECK_S if self._error is None else ERROR_GRACE_S / 10)
        for key, _ in ready:
            rank = key.data
            try:
                data = self._workers.pipes[rank].recv_bytes()
            except (EOFError, OSError):
                selector.unregister(key.fileobj)
                self._note_end(rank)
            else:
                self._deliver(rank, data)
        if time.monotonic() >= self._next_death_check:
            self._next_death_check = time.monotonic() + DEATH_CHECK_S
            for rank, pipe in enumerate(self._workers.pipes):
                # What a worker said before it died counts, so its pipe is read to the end first.
                if rank not in self._ended and self._workers.is_dead(rank) and not pipe.poll():
                    self._note_end(rank)

    def _note_end(self, rank: int) -> None:
        if rank not in self._ended:
            self._ended.append(rank)

    def _note_error(self, failure: Failure, grace: float) -> None:
        if self._error is None:
            self._error = failure
            self._error_deadline = time.monotonic() + (grace if len(self._placements) > 1 else 0.0)

    def _deliver(self, rank: int, data: bytes) -> None:
        try:
            reply: Reply = pickle.loads(data)
        except Exception as error:
            message = f"worker rank {rank} sent an answer that this process cannot read: {error!r}"
            self._note_error(Failure(rank, message, error), ERROR_GRACE_S)
            return
        if reply.op_id == STATUS:
            self._reports[rank] = time.monotonic(), reply.value
            return
        with self._state_lock:
            operation = self._pending.get(reply.op_id)
            if reply.error is not None:
                label = operation.label if operation else "a step that was answered before"
                failure = remote_failure(rank, label, reply.error)
                if operation is None or not operation.outlives_errors or isinstance(failure.cause, WorkerError):
                    self._note_error(failure, ERROR_GRACE_S)
                    return
                self._note_error(failure, CALL_GRACE_S)
                operation.failures[rank] = failure
            elif operation is None:
                return
            operation.values[rank] = reply.value
            operation.waiting.discard(rank)
            if operation.waiting:
                return
            del self._pending[reply.op_id]
        if operation.failures:
            self._error = None  # every rank has answered: they are in step, and the workers go on
        operation.complete()

    def _find_failure(self) -> Failure | None:
        if self._hang is not None:
            return self._hang
        error = self._error
        if self._ended:
            # The first whose end was noticed, unless it had said what was wrong before.
            return error if error is not None and error.rank in self._ended else self._death(self._ended[0])
        return error if error is not None and time.monotonic() >= self._error_deadline else None

    def _death(self, rank: int) -> Failure:
        with self._state_lock:
            during = next((f" during {operation.label}" for operation in self._pending.values()), "")
        end = self._workers.how_it_ended(rank)
        return Failure(rank, f"{self._workers.name(rank)} {end}{during}; all workers were stopped")

    def _fail_pending(self, failure: Failure) -> None:
        with self._state_lock:
            operations = list(self._pending.values())
            self._pending.clear()
        for operation in operations:
            operation.future.set_exception(failure.error())


def _send(pipe: Connection, data: bytes) -> None:
    try:
        pipe.send_bytes(data)
    except OSError:
        return  # the worker is gone: the reader finds out how it ended, and fails what is pending
