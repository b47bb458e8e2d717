"""Input lines of `dovetail chat`: editing and history where standard input is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from rich.console import Console

_MOST_LINES = 1000
_PROMPT = "> "


class LineInput:
    """Reads one line at a time. On a terminal the line can be edited, and the arrow keys bring back earlier lines, of
    earlier conversations too: they are kept in the user's cache folder, in a file that only the user can read."""

    def __init__(self, console: Console):
        self._console = console
        self.is_terminal = sys.stdin.isatty()
        self._readline = _readline() if self.is_terminal else None

    def read(self) -> str:
        """The next line. Raises `EOFError` at the end of input, `KeyboardInterrupt` at Ctrl-C."""
        if self.is_terminal:
            # The prompt goes through `input`, or readline would not know in which column the line begins.
            return input(_PROMPT)
        self._console.print(f"[bold]{_PROMPT}[/bold]", end="")
        return input()

    @contextlib.contextmanager
    def history(self) -> Iterator[None]:
        """Loads the history of earlier conversations, and saves it at the end. A history that cannot be read or written
        is left alone: a conversation works without."""
        if self._readline is None:
            yield
            return
        from dovetail.nn.native.disk_cache import cache_directory  # torch takes seconds, and --help needs none of it

        file = cache_directory() / "chat_history"
        with contextlib.suppress(OSError):
            self._readline.read_history_file(file)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                _save(self._readline, file)


def _save(readline: ModuleType, file: Path) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.touch(mode=0o600)
    readline.set_history_length(_MOST_LINES)
    readline.write_history_file(file)


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:  # Windows, and Pythons built without it
        return None
    return readline
