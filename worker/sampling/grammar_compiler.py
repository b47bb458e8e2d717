"""Compiles the grammars of requests, each once, on threads of their own; for the engine and the rank that samples."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from dovetail.config.resolved import Component
from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import CompiledGrammar, Grammar, GrammarSetup
from dovetail.contracts.grammar_spec import GrammarSpec
from dovetail.registry.calls import calling
from dovetail.registry.components import component_entry, create_class

logger = logging.getLogger("dovetail.grammars")

_NUM_KEPT = 64
"""Grammars that were used last; those of sequences live as long as these."""
_AT_A_TIME = 2
_MOST_HANGING = 8
"""Compilations that were given up and go on; with so many no other begins."""


@dataclass(eq=False)
class _Compilation:
    """One spec on its way."""

    spec: GrammarSpec
    future: Future[CompiledGrammar] = field(default_factory=Future)
    has_turn: bool = False
    is_over: bool = False
    """The future has its outcome, or is about to: whoever sets this gives it."""


class GrammarCompiler:
    """One grammar plugin, created when the first spec comes, or ahead of it. Safe to use from any thread.

    It pickles as what it is made of: a worker in the engine's process shares the engine's, one in another process has
    its own.
    """

    def __init__(self, component: Component, setup: GrammarSetup, wait_s: float, reads_ahead: bool = False):
        """`wait_s`: how long a spec may take, whatever the plugin does, the reading of the vocabulary included.
        `reads_ahead`: `read_ahead` creates the plugin."""
        self.component = component
        self.setup = setup
        self.wait_s = wait_s
        self.reads_ahead = reads_ahead
        self._lock = threading.Lock()
        self._compiled: OrderedDict[GrammarSpec, Future[CompiledGrammar]] = OrderedDict()
        self._hanging: dict[GrammarSpec, _Compilation] = {}
        """Given up, and still running: no library can be interrupted."""
        self._turns = threading.Semaphore(_AT_A_TIME)
        self._creating = threading.Lock()
        self._grammar: Grammar | None = None
        self._is_closed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return GrammarCompiler, (self.component, self.setup, self.wait_s, self.reads_ahead)

    def read_ahead(self) -> None:
        """Creates the plugin on a thread, where it is to be there before the first spec. Never waits."""
        if self.reads_ahead and self._grammar is None:
            threading.Thread(target=self._read_ahead, name="dovetail-grammar", daemon=True).start()

    def has(self, spec: GrammarSpec) -> bool:
        """Whether the grammar of `spec` is there."""
        with self._lock:
            future = self._compiled.get(spec)
            return future is not None and future.done() and future.exception() is None

    def compile(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """The grammar of `spec`, or a `RequestError` for its user, once it is there, or `wait_s` is over. Never
        waits."""
        with self._lock:
            future = self._compiled.get(spec)
            if future is not None and not (future.done() and future.exception() is not None):
                self._compiled.move_to_end(spec)
                return future
            if spec in self._hanging:
                return self._hanging[spec].future
            compilation = _Compilation(spec)
            if len(self._hanging) >= _MOST_HANGING:
                compilation.future.set_exception(self._too_many())
                return compilation.future
            self._compiled[spec] = compilation.future
            self._forget_oldest()
        timer = threading.Timer(self.wait_s, self._give_up, [compilation])
        timer.daemon = True
        timer.start()
        threading.Thread(target=self._compile, args=(compilation, timer), name="dovetail-grammar", daemon=True).start()
        return compilation.future

    def close(self) -> None:
        """Ends the plugin, and what it compiles. Idempotent."""
        self._is_closed = True
        # Without its lock: whoever creates the plugin closes it by itself then.
        if self._grammar is not None:
            self._grammar.close()

    def _forget_oldest(self) -> None:
        done = [spec for spec, future in self._compiled.items() if future.done()]
        for spec in done[: max(0, len(self._compiled) - _NUM_KEPT)]:
            del self._compiled[spec]

    def _compile(self, compilation: _Compilation, timer: threading.Timer) -> None:
        if not self._take_turn(compilation):
            return
        outcome: CompiledGrammar | RequestError
        try:
            outcome = self._plugin().compile(compilation.spec)
        except RequestError as error:
            outcome = error
        except BaseException as error:  # a plugin's fault costs the requests with this grammar, and no more
            name = self.component.name
            outcome = RequestError(f"grammar plugin {name!r} failed: {type(error).__name__}: {error}")
        timer.cancel()
        if not self._end(compilation):
            with self._lock:
                del self._hanging[compilation.spec]
        elif isinstance(outcome, RequestError):
            compilation.future.set_exception(outcome)
        else:
            compilation.future.set_result(outcome)

    def _take_turn(self, compilation: _Compilation) -> bool:
        """Waits for it. False where that took too long."""
        self._turns.acquire()
        with self._lock:
            compilation.has_turn = not compilation.is_over
        if not compilation.has_turn:
            self._turns.release()
        return compilation.has_turn

    def _end(self, compilation: _Compilation, *, hangs: bool = False) -> bool:
        """Whether the caller is the one that gives the outcome. The turn is free then."""
        with self._lock:
            if compilation.is_over:
                return False
            compilation.is_over = True
            if hangs and compilation.has_turn:
                self._hanging[compilation.spec] = compilation
        if compilation.has_turn:
            self._turns.release()
        return True

    def _give_up(self, compilation: _Compilation) -> None:
        if self._end(compilation, hangs=True):
            name = self.component.name
            logger.warning("grammar plugin %r: a grammar is not compiled after %g s", name, self.wait_s)
            error = RequestError(
                f"grammar plugin {name!r} has not compiled the grammar in {self.wait_s:g} seconds: make it smaller, or"
                " raise grammar.wait_seconds"
            )
            compilation.future.set_exception(error)

    def _too_many(self) -> RequestError:
        return RequestError(
            f"grammar plugin {self.component.name!r} hangs in {len(self._hanging)} grammars: no other is compiled until"
            " one of them ends; restart the engine, or take another grammar.name"
        )

    def _read_ahead(self) -> None:
        try:
            self._plugin()
        except BaseException as error:  # the first spec meets it again, and its user is told
            logger.warning("grammar plugin %r cannot be created: %s", self.component.name, error)

    def _plugin(self) -> Grammar:
        with self._creating:
            if self._is_closed:
                raise RequestError("the engine was shut down")
            if self._grammar is None:
                plugin, options = create_class(self.component)
                assert issubclass(plugin, Grammar)
                with calling(component_entry(self.component).label, "__init__"):
                    self._grammar = plugin(options, self.setup)
                if self._is_closed:
                    self._grammar.close()
            return self._grammar
