"""What a terminal shows while requests run."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.status import Status

from dovetail.contracts.outputs import BeamSearchOutput, RequestOutput, TokenProgress

_INTERVAL = 0.2
"""Seconds between two looks at requests that run."""


class GenerationProgress:
    """A progress bar over the requests of one call, with the tokens of their prompts and outputs so far and per second.
    Drawn on stderr; draws nothing where it is not enabled or stderr is no terminal."""

    def __init__(self, total: int, *, enabled: bool, console: Console | None = None):
        console = console if console is not None else Console(stderr=True)
        self._is_drawn = enabled and console.is_terminal
        self._progress = Progress(
            TextColumn("Prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rates]}"),
            console=console,
            disable=not self._is_drawn,
        )
        self._task = self._progress.add_task("prompts", total=total, rates="")
        self._started = self._last_update = time.monotonic()
        self._num_input = 0
        self._num_output = 0
        """Tokens of requests that are done."""

    @property
    def is_due(self) -> bool:
        """Whether the bar is drawn, and stands since long enough that `update` should be called."""
        return self._is_drawn and time.monotonic() - self._last_update >= _INTERVAL

    def update(self, running: TokenProgress) -> None:
        """Shows the tokens of requests that are done and of those that run."""
        self._last_update = time.monotonic()
        self._show(self._num_input + running.num_prompt_tokens, self._num_output + running.num_output_tokens)

    def finish(self, output: RequestOutput) -> None:
        """One request is done."""
        self._num_input += len(output.prompt_token_ids)
        self._num_output += sum(len(completion.token_ids) for completion in output.outputs)
        self._progress.advance(self._task)
        if self._progress.finished:
            self._show(self._num_input, self._num_output)

    def track_prompt(self, output: BeamSearchOutput) -> BeamSearchOutput:
        """One prompt's beams are done; hands them on."""
        self._progress.advance(self._task)
        return output

    def __enter__(self) -> GenerationProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def _show(self, num_input: int, num_output: int) -> None:
        seconds = max(time.monotonic() - self._started, 1e-9)
        rates = (
            f"in {num_input:,} tokens, {num_input / seconds:.0f} tok/s; "
            f"out {num_output:,}, {num_output / seconds:.0f} tok/s"
        )
        self._progress.update(self._task, rates=rates)


class PromptProgress:
    """A line on stderr that says how much of one prompt was computed. It is gone before the first text comes, and where
    stderr is no terminal it is never there."""

    def __init__(self, num_prompt_tokens: int, console: Console | None = None):
        console = console if console is not None else Console(stderr=True)
        self._total = num_prompt_tokens
        self._status = Status(self._text(0), console=console) if console.is_terminal else None

    def update(self, running: TokenProgress) -> None:
        """Shows how far the prompt is."""
        if self._status is not None:
            self._status.update(self._text(running.num_prompt_tokens))

    def stop(self) -> None:
        """Takes the line away. Idempotent."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def __enter__(self) -> PromptProgress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _text(self, num_computed: int) -> str:
        return f"[dim]reading the prompt: {num_computed:,} of {self._total:,} tokens[/dim]"
