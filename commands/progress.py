"""A progress bar for commands that measure."""

from __future__ import annotations

from types import TracebackType

import rich.progress
from rich.console import Console


class Progress:
    """A bar on stderr; not shown where stderr is no terminal."""

    def __init__(self, total: int):
        console = Console(stderr=True)
        self._progress = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TimeRemainingColumn(),
            console=console,
            transient=True,
            # A redraw takes time from what is measured.
            refresh_per_second=1,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=total)

    def show(self, what: str) -> None:
        """Shows what is going on."""
        self._progress.update(self._task, description=what)

    def advance(self) -> None:
        """Advances the bar by one of the total."""
        self._progress.advance(self._task)

    def __enter__(self) -> Progress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
