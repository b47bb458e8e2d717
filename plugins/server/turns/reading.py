"""Completions as events of a dialect, whatever pieces they come in."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import replace

from dovetail.contracts.dialect import CallBegin, CallEnd, Dialect, DialectRequest, Event, ReasoningDelta
from dovetail.contracts.outputs import CompletionOutput

_ALPHABET = string.ascii_letters + string.digits
_ID_LENGTH = 9
"""Some chat templates take ids of this length only."""


def new_call_id() -> str:
    """For a call to which the model gave none."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(_ID_LENGTH))


class TurnReader:
    """Reads one completion."""

    def __init__(self, dialect: Dialect, request: DialectRequest, *, shows_reasoning: bool = True):
        """`shows_reasoning`: False drops the events of reasoning."""
        self._parser = dialect.parser(request)
        self._shows_reasoning = shows_reasoning
        self._endings: list[str] = []

    def read(self, completion: CompletionOutput) -> Sequence[Event]:
        """The events of what is new. Every call has an id."""
        return self.read_text(completion.text, completion.finish_reason)

    def read_text(self, text: str, finish_reason: str | None) -> Sequence[Event]:
        """As `read`, of a piece of the completion's text; `finish_reason`: None until the last."""
        events = self._parser.push(text) if text else []
        if finish_reason is not None:
            events = [*events, *self._parser.finish()]
        return [self._completed(event) for event in events if self._shows_reasoning or not _is_reasoning(event)]

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's: "tool_calls" where the output ended by itself and all its calls are complete."""
        is_called = reason == "stop" and self._endings and set(self._endings) == {"complete"}
        return "tool_calls" if is_called else reason

    def _completed(self, event: Event) -> Event:
        if isinstance(event, CallEnd):
            self._endings.append(event.ending)
        if isinstance(event, CallBegin) and not event.call_id:
            return replace(event, call_id=new_call_id())
        return event


def _is_reasoning(event: Event) -> bool:
    return isinstance(event, ReasoningDelta)
