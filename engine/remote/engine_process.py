"""An engine's process: `EngineProcess` starts one and watches it; run as a module, this is what runs in it.

The configuration comes over standard input. What became of the start goes over standard output, one message:
`Started` or `Failed`.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import msgspec

from dovetail.config.layers import LayeredConfig
from dovetail.config.schema import ServerSection
from dovetail.contracts.errors import DovetailError, WorkerError
from dovetail.engine.remote.engine_server import EngineServer
from dovetail.engine.remote.messages import Failure, error_of, failure_of
from dovetail.engine.resolving import resolve
from dovetail.engine.token_engine import TokenEngine
from dovetail.registry.imports import import_environment, module_command
from dovetail.worker.machine.collector import collector_paused

logger = logging.getLogger("dovetail.engine")  # as it runs, this module is `__main__`

STOP_S = 30.0
"""How long an engine's process may take to end before it is killed."""
_ORPHAN_S = 2.0
"""How long it may take where the process that started it is gone, so that nobody waits for an orderly end."""
_SWITCH_S = 0.0005
_PR_SET_PDEATHSIG = 1


class Started(msgspec.Struct, array_like=True, tag=True):
    """The engine is ready."""


class Failed(msgspec.Struct, array_like=True, tag=True):
    """It is not."""

    failure: Failure


class EngineProcess:
    """An engine in a process of its own. It ends with this object's process, however that ends, and takes no signal
    that reaches a terminal's or a service's processes together: whoever started it decides."""

    def __init__(
        self,
        config: LayeredConfig,
        directory: str | Path | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
        cores: Collection[int] = (),
        label: str = "",
    ):
        """Starts the process; `wait` says when it serves. `directory`: where its socket is, private to the user.
        `environment`: variables to set in it. `cores`: logical CPUs that it and its workers run on; none: all that the
        calling thread may use. `label`: what messages of its log begin with, such as "replica 0"."""
        self._temporary = tempfile.TemporaryDirectory(prefix="dovetail-engine-") if directory is None else None
        self.directory = Path(directory if directory is not None else self._temporary.name)  # type: ignore[union-attr]
        self.address = f"ipc://{self.directory}/engine"
        with _bound_to(cores):
            self._process = subprocess.Popen(
                module_command("dovetail.engine.remote.engine_process", self.address, label),
                env={**import_environment(), **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        # It stays open: the process ends when it is closed.
        pickle.dump(config, self._process.stdin)
        self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def wait(self) -> None:
        """Returns once the engine serves. Raises what kept it from starting, `WorkerError` where the process died."""
        assert self._process.stdout is not None
        data = self._process.stdout.read()
        if not data:
            code = self._process.wait()
            raise WorkerError(f"the engine's process ended while it started, {_ending(code)}")
        answer = msgspec.msgpack.decode(data, type=Started | Failed)
        if isinstance(answer, Failed):
            self._process.wait()
            raise error_of(answer.failure)

    def join(self) -> int:
        """Waits for the end of the process; its exit code, negative for a signal."""
        return self._process.wait()

    def ask_to_end(self) -> None:
        """Has the engine end after the step that runs; does not wait. Idempotent."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def kill(self) -> None:
        """Ends the process and its workers at once, also one that hangs."""
        if self.is_alive:
            os.killpg(self.pid, signal.SIGKILL)

    def stop(self, timeout_s: float = STOP_S) -> None:
        """Has the engine end after the step that runs; kills the process where that takes longer. Idempotent."""
        self.ask_to_end()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextmanager
def _bound_to(cores: Collection[int]) -> Iterator[None]:
    """Processes that this thread starts meanwhile run on these cores from their first instruction."""
    if not cores or sys.platform != "linux":
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _ending(code: int) -> str:
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def main() -> None:
    """What runs in the process."""
    address, label, parent = sys.argv[1], sys.argv[2], os.getppid()
    if sys.platform == "linux":  # one that is halted would never notice the parent's end
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what libraries print is no answer
        message = f"{label}: %(message)s" if label else "%(message)s"
        logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s %(name)s: {message}")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a service manager's reach every process; the parent decides
        started: list[EngineServer] = []
        try:
            config = pickle.load(sys.stdin.buffer)
            threading.Thread(target=_end_with_parent, args=[parent, started], daemon=True).start()
            server = _start(config, address)
        except Exception as error:
            answers.write(msgspec.msgpack.encode(Failed(failure_of(error))))
            if not isinstance(error, DovetailError):
                logger.exception("the engine did not start")
            sys.exit(1)
        started.append(server)
        # What was imported and built stays: looking through it for garbage would hold up a step.
        gc.collect()
        gc.freeze()
        answers.write(msgspec.msgpack.encode(Started()))
    try:
        server.run()
    except WorkerError as error:
        logger.error("the engine ends: %s", error)
        sys.exit(1)


def _start(config: LayeredConfig, address: str) -> EngineServer:
    # Another thread listens to clients, and must not wait for the interpreter's lock as long as by default.
    sys.setswitchinterval(_SWITCH_S)
    server = config.config.server or ServerSection()
    with collector_paused():
        engine = TokenEngine(resolve(config))
        return EngineServer(engine, address, server.max_num_waiting, server.kept_requests, server.unhealthy_after_s)


def _end_with_parent(parent: int, started: list[EngineServer]) -> None:
    """The parent holds the other end of standard input. It lets go of it to end the engine, and when it ends itself,
    however it ends. An engine that starts or hangs then ends with its workers."""
    while os.read(0, 1):
        pass
    for server in started:
        server.stop()
        deadline = time.monotonic() + STOP_S
        while time.monotonic() < deadline and os.getppid() == parent:
            time.sleep(_ORPHAN_S / 20)
        time.sleep(_ORPHAN_S)
    os.killpg(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
