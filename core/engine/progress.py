"""A progress bar over the requests of one call, with input and output tokens per second."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dovetail.outputs import BeamSearchOutput, RequestOutput


class GenerationProgress:
    """Drawn on stderr; draws nothing where it is not enabled or stderr is no terminal."""

    def __init__(self, total: int, *, enabled: bool):
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("Prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rates]}"),
            console=console,
            disable=not (enabled and console.is_terminal),
        )
        self._task = self._progress.add_task("prompts", total=total, rates="")
        self._started = time.monotonic()
        self._num_input = 0
        self._num_output = 0

    def finish(self, output: RequestOutput) -> None:
        """One request is done."""
        self._num_input += len(output.prompt_token_ids)
        self._num_output += sum(len(completion.token_ids) for completion in output.outputs)
        seconds = max(time.monotonic() - self._started, 1e-9)
        rates = f"in {self._num_input / seconds:.0f} tok/s, out {self._num_output / seconds:.0f} tok/s"
        self._progress.update(self._task, advance=1, rates=rates)

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
