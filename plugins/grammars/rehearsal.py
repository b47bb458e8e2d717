"""Compilation within bounds: what may take long is compiled in a process of its own first, which can be stopped.

No library can be interrupted, and none keeps to a limit of time or memory in all cases. So a spec that is not plainly
small is rehearsed: a helper process compiles it, and is killed where it takes too long; what it brought to an end is
compiled here then, which takes as long again. The helper is started for the first such spec, and after one that was
stopped, and ends with this process at the latest.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import struct
import subprocess
import sys
import threading
import time
import weakref
from abc import abstractmethod
from importlib import import_module
from typing import Any, BinaryIO

from pydantic import Field

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import CompiledGrammar, Grammar, GrammarLimits, GrammarSetup
from dovetail.contracts.grammar_spec import GrammarSpec
from dovetail.contracts.plugin import PluginOptions

_START_S = 120.0
"""For the helper to import a library and read a vocabulary."""
_SIZE = struct.Struct("<Q")


class RehearsalOptions(PluginOptions):
    """When a spec is compiled in the helper process first."""

    rehearse_from_bytes: int = Field(default=4096, ge=0)
    """Specs of this many bytes are, 0: all; and shorter ones that count far: long repetitions, large divisors."""


class RehearsedGrammar(Grammar):
    """Compiles with `compile_here`, which knows no limits of time and memory, within limits."""

    Options = RehearsalOptions
    options: RehearsalOptions

    def __init__(self, options: RehearsalOptions, setup: GrammarSetup):
        super().__init__(options, setup)
        self._helper: _Helper | None = None
        self._lock = threading.Lock()

    @abstractmethod
    def compile_here(self, spec: GrammarSpec) -> CompiledGrammar:
        """As `compile`, but for limits of time and memory."""

    @abstractmethod
    def counts_far(self, spec: GrammarSpec) -> bool:
        """Whether compiling a short spec may take long all the same. Raises `RequestError` for one that is wrong."""

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """As `Grammar.compile`."""
        for form in spec.forms - self.capabilities.forms:
            raise RequestError(
                f"grammars of form {form} are not compiled here; these are: "
                f"{', '.join(sorted(self.capabilities.forms))}"
            )
        size = _source_size(spec)
        if size > self.setup.limits.source_bytes:
            raise RequestError(f"the grammar has {size} bytes; at most {self.setup.limits.source_bytes} are compiled")
        if self.counts_far(spec) or size >= self.options.rehearse_from_bytes:
            self._rehearse(spec)
        return self.compile_here(spec)

    def close(self) -> None:
        """As `Grammar.close`."""
        with self._lock:
            if self._helper is not None:
                self._helper.stop()
                self._helper = None

    def _rehearse(self, spec: GrammarSpec) -> None:
        """One spec at a time: whoever waits for others does not lose seconds of its own."""
        with self._lock:
            if self._helper is None or self._helper.is_dead:
                self._helper = _Helper(self)
            try:
                refusal = self._helper.ask(spec, self.setup.limits)
            except Exception:
                self._helper.stop()
                self._helper = None
                raise
        if refusal is not None:
            raise RequestError(refusal)


def _source_size(spec: GrammarSpec) -> int:
    texts = [spec.source, *(text for tag in spec.tags for text in (tag.begin, tag.end)), *spec.triggers]
    try:
        own = sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError as error:
        raise RequestError(f"the grammar has half of a character: {error}") from None
    return own + sum(_source_size(tag.content) for tag in spec.tags)


class _Helper:
    """The process that rehearses for one grammar."""

    def __init__(self, grammar: RehearsedGrammar):
        command = [sys.executable, "-P", "-m", "dovetail.plugins.grammars.rehearsal"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.stop = weakref.finalize(self, _stop, self._process)
        kind = type(grammar)
        self._send((kind.__module__, kind.__qualname__, grammar.options.model_dump(), grammar.setup))
        try:
            self._answer(_START_S)
        except (EOFError, TimeoutError):
            self.stop()
            raise RequestError("the process that compiles large grammars did not start: make it smaller") from None

    @property
    def is_dead(self) -> bool:
        """Whether it ended by itself, or was killed by others."""
        return self._process.poll() is not None

    def ask(self, spec: GrammarSpec, limits: GrammarLimits) -> str | None:
        """None if the spec compiles, else why not."""
        self._send(spec)
        try:
            answer: str | None = self._answer(limits.compile_seconds)
        except TimeoutError:
            raise RequestError(
                f"the grammar takes more than {limits.compile_seconds:g} seconds to compile: make it smaller (fewer "
                "alternatives, smaller repetitions and divisors)"
            ) from None
        except EOFError:
            raise RequestError(
                f"the grammar takes more than {limits.compile_bytes} bytes to compile: make it smaller (fewer "
                "alternatives, smaller repetitions and divisors)"
            ) from None
        return answer

    def _send(self, message: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer that does not come says so
            _write(self._process.stdin, message)

    def _answer(self, timeout_s: float) -> Any:
        stream = self._process.stdout
        assert stream is not None
        data, wanted, deadline = b"", _SIZE.size, time.monotonic() + timeout_s
        is_size = True
        while True:
            ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            part = os.read(stream.fileno(), wanted - len(data))
            if not part:
                raise EOFError
            data += part
            if len(data) == wanted:
                if not is_size:
                    return pickle.loads(data)
                data, wanted, is_size = b"", _SIZE.unpack(data)[0], False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def _write(stream: BinaryIO | Any, message: object) -> None:
    data = pickle.dumps(message)
    stream.write(_SIZE.pack(len(data)) + data)
    stream.flush()


def _read(stream: BinaryIO) -> Any:
    """Raises `EOFError` where the other end is gone."""
    size = stream.read(_SIZE.size)
    if len(size) < _SIZE.size:
        raise EOFError
    return pickle.loads(stream.read(_SIZE.unpack(size)[0]))


def _limit_memory(more_bytes: int) -> None:
    """What is allocated beyond what there is now, and so many bytes, fails."""
    try:
        import resource
    except ImportError:  # Windows has no such limit; the limit of time holds
        return
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more_bytes, now + more_bytes))


def _serve() -> None:
    # What libraries print must not get among the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    questions = sys.stdin.buffer
    module, name, options, setup = _read(questions)
    kind = getattr(import_module(module), name)
    grammar: RehearsedGrammar = kind(kind.Options.model_validate(options), setup)
    with contextlib.suppress(OSError):  # no /proc here
        _limit_memory(setup.limits.compile_bytes)
    _write(answers, "ready")
    while True:
        spec = _read(questions)
        try:
            grammar.compile_here(spec)
            refusal = None
        except RequestError as error:
            refusal = str(error)
        except MemoryError:
            os._exit(1)
        _write(answers, refusal)


if __name__ == "__main__":
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        _serve()
