"""One streamed reply: when its tokens came, how many there were, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from dovetail.commands.http import Failure

CountedBy = Literal["running usage", "usage", "chunks"]
"""How output tokens were counted. "running usage": the server says with each chunk how many there are by now. "usage":
it says so at the end, and a chunk's arrival is that of its token or tokens. "chunks": it does not say; a chunk is one
token."""

_DONE = b"[DONE]"
_DELTA_TEXTS = ("content", "reasoning_content", "reasoning")


class ReplyError(Exception):
    """A reply that cannot be counted."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.failure = Failure(kind, message)


@dataclass(frozen=True)
class Counted:
    """Output tokens of one reply."""

    tokens: Sequence[float]
    """Arrivals in seconds, of each token, or of each chunk where `total` is given."""
    total: int | None
    """The server's count, where it differs from the number of chunks."""
    counted_by: CountedBy


class ReplyReader:
    """Takes the events of one reply, each with the time at which it came."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.finish_reason: str | None = None
        self.usage: Mapping[str, Any] = {}
        self._is_done = False
        self._by_chunk: list[float] = []
        self._by_usage: list[float] = []
        self._silent_chunks = 0
        """Chunks with text that say no usage."""

    def take(self, data: bytes, clock: float) -> None:
        """Takes one event's data. Raises `ReplyError` where it is an error, or no chunk."""
        if data == _DONE:
            self._is_done = True
            return
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise ReplyError("bad event", f"an event of the stream is no JSON: {error}: {data[:80]!r}") from None
        if not isinstance(event, dict):
            raise ReplyError("bad event", f"an event of the stream is no object: {data[:80]!r}")
        if event.get("error"):
            raise ReplyError("error event", _error_text(event["error"]))
        try:
            self._count(event, clock)
        except (AttributeError, TypeError, ValueError) as error:
            raise ReplyError("bad event", f"an event of the stream is no chunk: {error}: {data[:80]!r}") from None

    def _count(self, event: Mapping[str, Any], clock: float) -> None:
        choices, usage = event.get("choices") or (), event.get("usage")
        if usage:
            self.usage = usage
            self._by_usage += [clock] * (int(usage.get("completion_tokens") or 0) - len(self._by_usage))
        for choice in choices:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if text := _text(choice):
                self.text.append(text)
                self._by_chunk.append(clock)
                self._silent_chunks += not usage

    def finish(self) -> Counted:
        """Returns the tokens of the whole reply. Raises `ReplyError` where the stream was cut off, or brought none."""
        if not self._is_done and self.finish_reason is None:
            raise ReplyError("broken", f"the stream ended after {len(self._by_chunk)} chunks, before its end was told")
        if not self._by_chunk and not self._by_usage:
            raise ReplyError("no tokens", f"the reply has no tokens (finish_reason {self.finish_reason})")
        if self._by_usage and not self._silent_chunks:
            return Counted(self._by_usage, None, "running usage")
        if not self._by_usage:
            return Counted(self._by_chunk, None, "chunks")
        total = len(self._by_usage)
        return Counted(self._by_chunk, None if total == len(self._by_chunk) else total, "usage")

    @property
    def prompt_tokens(self) -> int | None:
        """By the server's count; None where it does not say."""
        return self.usage.get("prompt_tokens")

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens from the prefix cache, by the server's count; 0 where it does not say."""
        details = self.usage.get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)


def _text(choice: Mapping[str, Any]) -> str:
    """The text that a chunk adds, of completions or of a chat; a tool call's arguments too."""
    if "text" in choice:
        return choice["text"] or ""
    delta = choice.get("delta") or {}
    texts = [delta.get(name) or "" for name in _DELTA_TEXTS]
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        texts += [function.get("name") or "", function.get("arguments") or ""]
    return "".join(texts)


def _error_text(error: Any) -> str:
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)
