"""The process of `dovetail serve`: it starts an engine and API processes, and watches them.

    supervisor -- engine process 1 .. M, the replicas
               -- API process 1 .. N, which accept from one socket

An API process that ends is replaced: its own streams are lost, no others. An engine that ends is started again by the
policy of the config; API processes use other replicas meanwhile, and answer 503 where there is none. A replica that
is not started again is left out; the server ends with the last one. SIGTERM and SIGINT drain: API processes take no
new requests and end once theirs are done, then the engines end. A second signal kills everything at once. Nothing else
takes these signals: each process is in a session of its own.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from dovetail import EngineProcess
from dovetail.commands import LayeredConfig
from dovetail.contracts.errors import DovetailError
from dovetail.plugins.server.api_process import APIJob, APIProcess
from dovetail.plugins.server.replica_machine import ReplicaShare

logger = logging.getLogger("dovetail.server")


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """What happens when the engine's process ends by itself."""

    policy: Literal["never", "on_failure"] = "on_failure"
    max_restarts: int = 3
    """Within `window_s`; one more ends the server."""
    window_s: float = 600.0


@dataclass(frozen=True)
class _EngineStarted:
    process: EngineProcess
    error: DovetailError | None


@dataclass(frozen=True)
class _EngineEnded:
    process: EngineProcess
    code: int


@dataclass(frozen=True)
class _APIStarted:
    process: APIProcess


@dataclass(frozen=True)
class _APIFailed:
    """It cannot serve, and neither could the next one."""

    process: APIProcess
    error: DovetailError


@dataclass(frozen=True)
class _APIEnded:
    process: APIProcess
    code: int


@dataclass(frozen=True)
class _Signal:
    number: int


_Event = _EngineStarted | _EngineEnded | _APIStarted | _APIFailed | _APIEnded | _Signal
_API_RESTARTS, _API_WINDOW_S = 10, 60.0
"""API processes that may end within so many seconds; more of them have a fault that no restart mends."""
_ENGINE_STOP_S = 30.0
"""For the step that runs; then the engine is killed."""
_POLL_S = 0.05
"""Between looks at an engine that ends."""


class Supervisor:
    """Runs in the main thread, whose signals it takes."""

    def __init__(
        self,
        config: LayeredConfig,
        job: Callable[[tuple[str, ...]], APIJob],
        listener: socket.socket,
        *,
        num_api_processes: int = 1,
        shares: Sequence[ReplicaShare] = (ReplicaShare(),),
        restart: RestartPolicy = RestartPolicy(),
    ):
        """`job`: what API processes do, for the engines at these addresses. `shares`: what each replica gets."""
        self._config = config
        self._create_job = job
        self._listener = listener
        self._num_api_processes = num_api_processes
        self._shares = shares
        self._num_engines = len(shares)
        self._restart = restart
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._apis: set[APIProcess] = set()
        self._serving: set[APIProcess] = set()
        """Those of `_apis` that take requests."""
        self._is_draining = False
        self._is_ended_at_once = False
        self._has_served = False
        self._engines: dict[Path, EngineProcess] = {}
        """By its directory, each replica that runs or starts."""
        self._started: set[Path] = set()
        """Directories of replicas that have served."""
        self._engine_ends: dict[Path, deque[float]] = {}
        self._api_ends: deque[float] = deque()

    def run(self, on_ready: Callable[[], None] = lambda: None) -> int:
        """Serves until a signal or a failure; the exit code. `on_ready` is called once all API processes take
        requests. Raises what kept the engine or an API process from starting."""
        self._take_signals()
        with tempfile.TemporaryDirectory(prefix="dovetail-") as directory:
            self._addresses = self._start_engines(Path(directory))
            try:
                while (code := self._deal_with(self._events.get(), on_ready)) is None:
                    pass
            finally:
                self._end_all()
            return 1 if self._is_ended_at_once else code

    def _take_signals(self) -> None:
        def note(number: int, frame: FrameType | None) -> None:
            self._events.put(_Signal(number))

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, note)

    def _start_engines(self, directory: Path) -> tuple[str, ...]:
        """Starts all replicas; returns their addresses."""
        for index in range(self._num_engines):
            own = directory / f"engine-{index}" if self._num_engines > 1 else directory
            own.mkdir(exist_ok=True)
            self._engine_ends[own] = deque()
            self._start_engine(own)
        return tuple(engine.address for engine in self._engines.values())

    def _start_engine(self, directory: Path) -> None:
        index = list(self._engine_ends).index(directory)
        share = self._shares[index]
        label = f"replica {index}" if len(self._shares) > 1 else ""
        engine = EngineProcess(self._config, directory, share.environment, share.cores, label)
        self._engines[directory] = engine

        def wait() -> _Event:
            try:
                engine.wait()
            except DovetailError as error:
                return _EngineStarted(engine, error)
            return _EngineStarted(engine, None)

        self._report(wait)

    def _start_api(self) -> None:
        process = APIProcess(self._create_job(self._addresses), self._listener)
        self._apis.add(process)

        def wait() -> _Event:
            try:
                is_serving = process.wait()
            except DovetailError as error:
                return _APIFailed(process, error)
            return _APIStarted(process) if is_serving else _APIEnded(process, process.join())

        self._report(wait)

    def _report(self, wait: Callable[[], _Event]) -> None:
        """Puts what `wait` returns among the events; it waits in a thread of its own."""
        threading.Thread(target=lambda: self._events.put(wait()), name="dovetail-watch", daemon=True).start()

    def _deal_with(self, event: _Event, on_ready: Callable[[], None]) -> int | None:
        """The exit code where the server ends."""
        if isinstance(event, _Signal):
            return self._signalled()
        if isinstance(event, _APIStarted):
            return self._api_started(event, on_ready)
        if isinstance(event, _APIFailed):
            return self._api_failed(event)
        if isinstance(event, _APIEnded):
            return self._api_ended(event)
        if isinstance(event, _EngineStarted):
            return self._engine_started(event)
        return self._engine_ended(event)

    def _signalled(self) -> int | None:
        if self._is_draining:
            self._end_at_once()
            return 1
        self._is_draining = True
        for process in self._apis:
            process.drain()
        return None if self._apis else 0

    def _end_at_once(self) -> None:
        logger.warning("a second signal: ending at once")
        self._is_ended_at_once = True

    def _engine_started(self, event: _EngineStarted) -> int | None:
        if event.error is not None:
            if len(self._started) < self._num_engines:
                raise event.error
            return self._restart_engine(
                event.process, f"{self._name(event.process)} did not start again ({event.error})"
            )
        engine = event.process
        self._report(lambda: _EngineEnded(engine, engine.join()))
        self._started.add(engine.directory)
        if not self._apis and len(self._started) == self._num_engines:
            for _ in range(self._num_api_processes):
                self._start_api()
        return None

    def _name(self, engine: EngineProcess) -> str:
        """For messages."""
        if self._num_engines == 1:
            return "the engine's process"
        return f"the process of replica {list(self._engine_ends).index(engine.directory)}"

    def _api_started(self, event: _APIStarted, on_ready: Callable[[], None]) -> int | None:
        self._report(lambda: _APIEnded(event.process, event.process.join()))
        self._serving.add(event.process)
        if not self._has_served and not self._is_draining and len(self._serving) == self._num_api_processes:
            self._has_served = True
            on_ready()
        return None

    def _api_failed(self, event: _APIFailed) -> int | None:
        if not self._has_served and not self._is_draining:
            raise event.error
        self._forget(event.process)
        logger.error("an API process cannot serve, and is not started again: %s", event.error)
        if self._apis:
            return None
        return 0 if self._is_draining else 1

    def _forget(self, process: APIProcess) -> None:
        self._apis.discard(process)
        self._serving.discard(process)
        process.close()

    def _api_ended(self, event: _APIEnded) -> int | None:
        self._forget(event.process)
        if self._is_draining:
            return None if self._apis else 0
        if _too_many(self._api_ends, _API_RESTARTS, _API_WINDOW_S):
            logger.error("API processes end again and again, the last with exit code %d: giving up", event.code)
            return 1
        logger.warning("an API process ended with exit code %d: its streams are lost, another takes over", event.code)
        self._start_api()
        return None

    def _engine_ended(self, event: _EngineEnded) -> int | None:
        return self._restart_engine(event.process, f"{self._name(event.process)} ended with exit code {event.code}")

    def _restart_engine(self, ended: EngineProcess, cause: str) -> int | None:
        if self._is_draining:
            return None
        policy, ends = self._restart, self._engine_ends[ended.directory]
        if policy.policy == "never" or _too_many(ends, policy.max_restarts, policy.window_s):
            logger.error("%s: it is not started again (server.restart)", cause)
            del self._engines[ended.directory]
            ended.stop()
            return None if self._engines else 1
        logger.error("%s: starting it again", cause)
        ended.stop()
        self._start_engine(ended.directory)
        return None

    def _wait_for_engines(self) -> None:
        """Lets the engines finish their step; a signal ends the wait."""
        for engine in self._engines.values():
            engine.ask_to_end()
        deadline = time.monotonic() + _ENGINE_STOP_S
        while any(engine.is_alive for engine in self._engines.values()) and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                if isinstance(self._events.get(timeout=_POLL_S), _Signal):
                    self._end_at_once()
                    return

    def _end_all(self) -> None:
        for process in self._apis:
            process.kill()
        for process in self._apis:
            process.close()
        self._apis.clear()
        if not self._is_ended_at_once:
            self._wait_for_engines()
        for engine in self._engines.values():
            engine.kill()
            engine.stop()


def _too_many(ends: deque[float], limit: int, window_s: float) -> bool:
    """Whether this end is one more than `limit` within the window."""
    now = time.monotonic()
    ends.append(now)
    while ends and ends[0] < now - window_s:
        ends.popleft()
    return len(ends) > limit
