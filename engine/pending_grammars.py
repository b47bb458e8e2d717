"""Requests that wait until their grammar is compiled: held so long, by the engine itself."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from dovetail.contracts.grammar import CompiledGrammar
from dovetail.engine.sequence import Sequence


@dataclass(slots=True)
class GrammarWait:
    """How long a request waited for its grammar. Times are seconds of time.monotonic()."""

    was_compiled: bool
    """Whether it was there when the request came."""
    since: float
    until: float | None = None
    """None while it is compiled."""
    is_refused: bool = False
    """It cannot be compiled."""


class PendingGrammars:
    """Compilations end at any time, on their own threads; sequences change between two steps."""

    def __init__(self, notify: Callable[[], None]):
        """`notify`: called, from any thread, when something has landed."""
        self._notify = notify
        self.landed: deque[tuple[list[Sequence], Future[CompiledGrammar]]] = deque()
        """Compilations that ended since the last step, with the sequences of the request that waits."""

    def hold(
        self, sequences: list[Sequence], compiled: Future[CompiledGrammar], *, was_compiled: bool = False
    ) -> GrammarWait:
        """The sequences of a new request wait for its grammar. `was_compiled`: before the request came."""
        wait = GrammarWait(was_compiled, time.monotonic())
        for sequence in sequences:
            sequence.wait_for_grammar(True)
        compiled.add_done_callback(partial(self._land, sequences, wait))
        return wait

    def take(self) -> list[tuple[str, str]]:
        """Lets requests go on whose grammars are there. Returns ids and messages of those that cannot."""
        failed = []
        while self.landed:
            sequences, compiled = self.landed.popleft()
            error = compiled.exception()
            for sequence in sequences:
                sequence.wait_for_grammar(False)
            if error is not None and not sequences[0].is_finished:
                failed.append((sequences[0].request_id, str(error)))
        return failed

    def _land(self, sequences: list[Sequence], wait: GrammarWait, compiled: Future[CompiledGrammar]) -> None:
        wait.is_refused = compiled.exception() is not None
        wait.until = time.monotonic()
        self.landed.append((sequences, compiled))
        self._notify()
