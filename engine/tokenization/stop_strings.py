"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Finds the first stop string, wherever the pieces of text are cut.

    The piece of text (a token's, usually) that first completes one ends the search; of several that it completes, the
    first of `stop` counts, as in vLLM.
    """

    def __init__(self, stop: Sequence[str], include_stop_str_in_output: bool = False):
        self._stop = tuple(stop)
        self._includes_stop = include_stop_str_in_output
        self._first_chars = {text[0] for text in self._stop}
        self._longest_held = max((len(text) for text in self._stop), default=1) - 1
        self._parts: list[str] = []
        self._held = ""
        """The end of the text, as far as it may begin a stop string."""
        self.matched: str | None = None
        """The stop string that was found; no text is taken after it."""

    @property
    def text(self) -> str:
        """All text so far; after a match, up to the stop string, or with it where that was asked for."""
        return self.safe_text if self._includes_stop else self.safe_text + self._held

    @property
    def safe_text(self) -> str:
        """`text` without an end that may turn out to belong to a stop string: what may be shown already."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def push(self, text: str, *, may_stop: bool = True) -> str | None:
        """Takes the next piece of text; returns the stop string if it is complete now. A piece that may not stop
        completes none, but may begin one."""
        if self.matched is not None or not text:
            return self.matched
        if not self._held and self._first_chars.isdisjoint(text):
            self._parts.append(text)
            return None
        window = self._held + text
        match = self._find(window) if may_stop else None
        if match is None:
            held = self._possible_start(window)
        else:
            start, self.matched = match
            held = ""
            window = window[: start + len(self.matched)] if self._includes_stop else window[:start]
        if self._includes_stop:
            # Nothing is ever taken back, so nothing waits: the held text is out already.
            self._parts.append(window[len(self._held) :])
        else:
            self._parts.append(window[: len(window) - len(held)])
        self._held = held
        return self.matched

    def _find(self, window: str) -> tuple[int, str] | None:
        """Where the first listed stop string begins of those that end behind the held text."""
        for stop in self._stop:
            start = window.find(stop, max(0, len(self._held) + 1 - len(stop)))
            if start >= 0:
                return start, stop
        return None

    def _possible_start(self, window: str) -> str:
        for length in range(min(self._longest_held, len(window)), 0, -1):
            end = window[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return end
        return ""
