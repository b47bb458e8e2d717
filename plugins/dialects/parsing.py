"""The parser that the bundled dialects share: reasoning first, then content with calls in it.

A dialect says in a `CallSyntax` what a call looks like. Everything that the parser decides follows from the text from
some position on, and is decided as soon as that text suffices, so it does not matter in which pieces it comes.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from dovetail.contracts.dialect import (
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    DialectParser,
    DialectRequest,
    Ending,
    Event,
    ReasoningDelta,
    TextDelta,
)
from dovetail.plugins.dialects.json_text import JSONReader
from dovetail.plugins.dialects.shapes import LINE_BREAK, Shape, lit, seq


class ArgumentsReader(ABC):
    """Reads the arguments of one call."""

    is_done = False
    is_broken = False

    @abstractmethod
    def read(self, text: str) -> tuple[str, int]:
        """More of the arguments as JSON, and how many characters of `text` they took; the rest is shown again, with
        what follows it."""

    def flush(self, text: str) -> tuple[str, int]:
        """As `read`, where the output ended in the arguments; what is not taken is content."""
        return "", len(text)


class JSONArguments(ArgumentsReader):
    """Arguments that are written as a JSON object."""

    def __init__(self, request: DialectRequest, name: str):
        self._reader = JSONReader()

    def read(self, text: str) -> tuple[str, int]:
        """See `ArgumentsReader.read`."""
        piece, end = self._reader.read(text)
        self.is_done, self.is_broken = self._reader.is_done, self._reader.is_broken
        return piece, end

    def flush(self, text: str) -> tuple[str, int]:
        """See `ArgumentsReader.flush`."""
        return text, len(text)


@dataclass(frozen=True)
class CallSyntax:
    """What a call looks like."""

    start: Shape
    """From the first marker to the first character of the arguments. The group `json_name` is the name as a JSON string
    has it, `name` as it is; `call_id` perhaps the model's id."""
    end: Shape
    """From the arguments' end to the end of the call, or of all calls."""
    next: Shape | None = None
    """From the arguments' end to the arguments of the next call, where calls share a marker. Groups as in `start`."""
    arguments: Callable[[DialectRequest, str], ArgumentsReader] = JSONArguments
    is_argument: str = "{"
    """Last character of `start` that is part of the arguments; a call that starts without it has none."""


@dataclass(frozen=True)
class ThinkSyntax:
    """What reasoning looks like: two markers, with line breaks around them."""

    open: str
    close: str
    open_shape: Shape
    close_shape: Shape

    def is_open(self, prompt_tail: str) -> bool:
        """Whether the prompt ends within reasoning."""
        return prompt_tail.rfind(self.open) > prompt_tail.rfind(self.close)


def think_syntax(opening: str, closing: str) -> ThinkSyntax:
    """`opening` and `closing`: markers as they are written, with line breaks, of which fewer may come."""
    open_marker, close_marker = opening.strip(), closing.strip()
    return ThinkSyntax(
        open_marker,
        close_marker,
        Shape(seq(LINE_BREAK, LINE_BREAK, lit(open_marker))),
        Shape(seq(LINE_BREAK, lit(close_marker)) if closing.startswith("\n") else lit(close_marker)),
    )


class TextParser(DialectParser):
    """A parser of reasoning, content and calls."""

    def __init__(self, request: DialectRequest, think: tuple[str, str] | None, calls: CallSyntax | None):
        """`think`: as `Dialect.reasoning_markers`. `calls`: None where none is looked for."""
        self._request = request
        self._calls = calls if request.tools and request.choice.mode != "none" else None
        self._think = None if think is None else think_syntax(*think)
        self._num_breaks = (0, 0) if think is None else (_breaks_behind(think[0]), _breaks_behind(think[1]))
        self._buffer = ""
        self._skips = 0
        """Line breaks that belong to the marker before them, if they come."""
        self._num_calls = 0
        self._has_content = False
        self._reader: ArgumentsReader | None = None
        self._state = self._content if self._think is None else self._opening
        if self._think is not None and self._think.is_open(request.prompt_tail):
            written = request.prompt_tail.endswith("\n")
            self._reason(0 if written else self._num_breaks[0])

    def push(self, text: str) -> list[Event]:
        """See `DialectParser.push`."""
        self._buffer += text
        events: list[Event] = []
        while self._state(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """See `DialectParser.finish`."""
        events: list[Event] = []
        if self._state == self._reasoning:
            self._show(events, ReasoningDelta, len(self._buffer))
        elif self._state == self._arguments and self._reader is not None:
            piece, end = self._reader.flush(self._buffer)
            self._add_arguments(events, piece)
            self._drop(end)
            self._end_call(events, "truncated")
            self._show(events, TextDelta, len(self._buffer))
        else:
            if self._state == self._behind_call:
                self._drop_end()
            self._show(events, TextDelta, len(self._buffer))
        self._buffer = ""
        return events

    # States: each takes what it can from the buffer, and says whether there is more to do.

    def _opening(self, events: list[Event]) -> bool:
        """Nothing was written yet."""
        assert self._think is not None
        match = self._think.open_shape.match(self._buffer)
        if match is not None:
            self._drop(match.end())
            self._reason(self._num_breaks[0])
        elif self._think.open_shape.may_begin(self._buffer):
            return False
        else:
            self._state = self._content
        return True

    def _reason(self, skips: int) -> None:
        self._skips = skips
        self._state = self._reasoning

    def _reasoning(self, events: list[Event]) -> bool:
        assert self._think is not None
        if self._skips:
            self._skip_breaks()
        shape = self._think.close_shape
        if not shape.may_be_in(self._buffer):
            self._show(events, ReasoningDelta, len(self._buffer))
            return False
        match, held = shape.find(self._buffer), shape.held(self._buffer)
        if match is None or held < match.start():
            self._show(events, ReasoningDelta, held)
            return False
        end = match.end() - match.start()
        self._show(events, ReasoningDelta, match.start())
        self._drop(end)
        self._skips = self._num_breaks[1]
        self._state = self._content
        return True

    def _content(self, events: list[Event]) -> bool:
        if self._skips:
            self._skip_breaks()
        if self._calls is None or not self._may_call() or not self._calls.start.may_be_in(self._buffer):
            self._show(events, TextDelta, len(self._buffer))
            return False
        match, held = self._calls.start.find(self._buffer), self._calls.start.held(self._buffer)
        if match is None or held < match.start():
            self._show(events, TextDelta, held)
            return False
        self._show(events, TextDelta, match.start())
        if not self._may_call():
            return True
        self._begin_call(events, self._calls, match)
        return True

    def _may_call(self) -> bool:
        """A response in a format that has begun is content to its end."""
        return self._request.response_format is None or not self._has_content

    def _arguments(self, events: list[Event]) -> bool:
        assert self._reader is not None
        piece, end = self._reader.read(self._buffer)
        self._add_arguments(events, piece)
        self._drop(end)
        if self._reader.is_broken:
            self._end_call(events, "malformed")
            self._state = self._content
        elif self._reader.is_done:
            self._end_call(events, "complete")
            self._state = self._behind_call
        else:
            return False
        return True

    def _behind_call(self, events: list[Event]) -> bool:
        assert self._calls is not None
        following = self._calls.next
        match = None if following is None else following.match(self._buffer)
        if match is not None:
            self._begin_call(events, self._calls, match)
            return True
        if following is not None and following.may_begin(self._buffer):
            return False
        match = self._calls.end.match(self._buffer)
        if match is None and self._calls.end.may_begin(self._buffer):
            return False
        if match is not None:
            self._drop(match.end())
        self._state = self._content
        return True

    def _begin_call(self, events: list[Event], calls: CallSyntax, match: re.Match[str]) -> None:
        groups = match.groupdict()
        text, json_name = match.group(), groups.get("json_name")
        name = groups["name"] if json_name is None else _unescaped(json_name)
        has_arguments = text.endswith(calls.is_argument)
        self._drop(len(text) - len(calls.is_argument) if has_arguments else len(text))
        events.append(CallBegin(self._num_calls, name, groups.get("call_id") or ""))
        if has_arguments:
            self._reader = calls.arguments(self._request, name)
            self._state = self._arguments
            return
        self._add_arguments(events, "{}")
        self._end_call(events, "complete")
        self._state = self._behind_call

    def _end_call(self, events: list[Event], ending: Ending) -> None:
        events.append(CallEnd(self._num_calls, ending))
        self._num_calls += 1
        self._reader = None

    def _add_arguments(self, events: list[Event], text: str) -> None:
        if text:
            events.append(ArgumentsDelta(self._num_calls, text))

    def _show(self, events: list[Event], delta: type[TextDelta] | type[ReasoningDelta], end: int) -> None:
        """The first `end` characters of the buffer are an event."""
        if end:
            text = self._buffer[:end]
            events.append(delta(text))
            self._has_content = self._has_content or (delta is TextDelta and not text.isspace())
            self._drop(end)

    def _drop(self, end: int) -> None:
        self._buffer = self._buffer[end:]

    def _drop_end(self) -> None:
        """Drops what there is of a call's end, where the output ends in it."""
        assert self._calls is not None
        match = self._calls.end.match(self._buffer)
        if match is not None:
            self._drop(match.end())
        elif self._calls.end.may_begin(self._buffer):
            self._buffer = ""

    def _skip_breaks(self) -> None:
        while self._skips and self._buffer:
            if self._buffer[0] != "\n":
                self._skips = 0
                return
            self._drop(1)
            self._skips -= 1


def _breaks_behind(marker: str) -> int:
    return len(marker) - len(marker.rstrip("\n"))


def _unescaped(inside: str) -> str:
    """The text of a JSON string, or what was written there where it is none."""
    try:
        text: str = json.loads(f'"{inside}"')
        text.encode()  # half of a surrogate pair is no text
    except ValueError:
        return inside
    return text
