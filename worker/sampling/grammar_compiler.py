"""Compiles the grammars of requests, each once, on threads of their own; for the engine and the rank that samples."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import Any

from dovetail.config.resolved import Component
from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import CompiledGrammar, Grammar, GrammarSetup
from dovetail.contracts.grammar_spec import GrammarSpec
from dovetail.registry.components import create_class

_NUM_KEPT = 64
"""Grammars that were used last; those of sequences live as long as these."""
_AT_A_TIME = 2


class GrammarCompiler:
    """One grammar plugin, created when the first spec comes. Safe to use from any thread.

    It pickles as what it is made of: a worker in the engine's process shares the engine's, one in another process has
    its own.
    """

    def __init__(self, component: Component, setup: GrammarSetup):
        self.component = component
        self.setup = setup
        self._lock = threading.Lock()
        self._compiled: OrderedDict[GrammarSpec, Future[CompiledGrammar]] = OrderedDict()
        self._turns = threading.Semaphore(_AT_A_TIME)
        self._creating = threading.Lock()
        self._grammar: Grammar | None = None
        self._is_closed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return GrammarCompiler, (self.component, self.setup)

    def has(self, spec: GrammarSpec) -> bool:
        """Whether the grammar of `spec` is there."""
        with self._lock:
            future = self._compiled.get(spec)
            return future is not None and future.done() and future.exception() is None

    def compile(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """The grammar of `spec`, or a `RequestError` for its user, once it is there. Never waits."""
        with self._lock:
            future = self._compiled.get(spec)
            if future is not None and not (future.done() and future.exception() is not None):
                self._compiled.move_to_end(spec)
                return future
            future = self._compiled[spec] = Future()
            self._forget_oldest()
        threading.Thread(target=self._compile, args=(spec, future), name="dovetail-grammar", daemon=True).start()
        return future

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

    def _compile(self, spec: GrammarSpec, future: Future[CompiledGrammar]) -> None:
        with self._turns:
            try:
                compiled = self._plugin().compile(spec)
            except RequestError as error:
                future.set_exception(error)
            except BaseException as error:  # a plugin's fault costs the requests with this grammar, and no more
                name = self.component.name
                future.set_exception(RequestError(f"grammar plugin {name!r} failed: {type(error).__name__}: {error}"))
            else:
                future.set_result(compiled)

    def _plugin(self) -> Grammar:
        with self._creating:
            if self._is_closed:
                raise RequestError("the engine was shut down")
            if self._grammar is None:
                plugin, options = create_class(self.component)
                assert issubclass(plugin, Grammar)
                self._grammar = plugin(options, self.setup)
                if self._is_closed:
                    self._grammar.close()
            return self._grammar
