"""Streams text to the terminal while it is generated."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest

from dovetail.commands.errors import create_console
from dovetail.contracts.errors import DovetailError, RequestError
from dovetail.contracts.lora import LoRARequest
from dovetail.contracts.outputs import RequestMetrics, RequestOutput
from dovetail.contracts.prompts import Prompt
from dovetail.contracts.sampling import SamplingParams
from dovetail.engine.engine import LLMEngine
from dovetail.engine.progress import PromptProgress


def stream(
    engine: LLMEngine, prompt: Prompt, params: SamplingParams, *, lora_request: LoRARequest | None = None
) -> RequestOutput | None:
    """Completes one prompt, printing text as it comes; returns the last output, whose completion holds all text.
    `lora_request`: an adapter that is added to the weights.

    A terminal shows the progress of the prompt. Ctrl-C aborts the request: the output then has finish_reason "abort"
    and the text so far; None where there was no text.
    """
    if params.num_sequences != 1:
        raise RequestError("several completions cannot be streamed to one terminal: leave n at 1")
    request_id = "terminal"
    processed = engine.process_input(prompt, replace(params, output_kind="cumulative"))
    engine.add_request(request_id, processed, lora_request=lora_request)
    printed, last = 0, None
    try:
        with PromptProgress(len(processed.token_ids)) as progress:
            while engine.has_unfinished_requests():
                outputs = engine.step()
                if last is None:
                    progress.update(engine.token_progress([request_id]))
                for output in outputs:
                    progress.stop()
                    last, text = output, output.outputs[0].text
                    sys.stdout.write(text[printed:])
                    sys.stdout.flush()
                    printed = len(text)
    except KeyboardInterrupt:
        # In the middle of a step it has ended the request already, without a last output.
        engine.abort_request(request_id)
        if last is not None:
            last.outputs[0].finish_reason = "abort"
        return last
    finally:
        sys.stdout.write("\n")
    if last is None or last.error is not None:
        raise DovetailError(f"the request failed: {last.error if last is not None else 'nothing was generated'}")
    return last


def print_rates(output: RequestOutput) -> None:
    """Prints one line about speed on stderr."""
    metrics = output.metrics
    if metrics.first_token_time is None:
        return
    generated = len(output.outputs[0].token_ids)
    # An output that Ctrl-C cut off has no time of its end.
    ended = time.monotonic() if metrics.finished_time is None else metrics.finished_time
    decoding = ended - metrics.first_token_time
    rate = f", {(generated - 1) / decoding:.1f} tok/s" if generated > 1 and decoding > 0 else ""
    first = 1e3 * (metrics.first_token_time - metrics.arrival_time)
    create_console(stderr=True).print(
        f"[dim]{len(output.prompt_token_ids)} tokens in, {generated} out, first after {first:.0f} ms{rate}[/dim]"
    )


def print_speculation(outputs: Iterable[RequestOutput]) -> None:
    """Prints how many draft tokens were accepted, one line for each drafter, on stderr."""
    console = create_console(stderr=True)
    by_drafter: dict[str, list[RequestMetrics]] = {}
    for output in outputs:
        if output.metrics.drafter is not None:
            by_drafter.setdefault(output.metrics.drafter, []).append(output.metrics)
    if not by_drafter:
        console.print("[dim]speculation: no request had a drafter[/dim]")
    for name, metrics in by_drafter.items():
        console.print(f"[dim]{_speculation_line(name, metrics)}[/dim]")


def _speculation_line(name: str, metrics: Sequence[RequestMetrics]) -> str:
    rounds = sum(one.num_draft_rounds for one in metrics)
    drafted = sum(one.num_drafted for one in metrics)
    accepted = sum(one.num_accepted for one in metrics)
    errors = [one.drafter_error for one in metrics if one.drafter_error is not None]
    line = f"speculation by {name}: {drafted} drafted, {accepted} accepted"
    if drafted:
        by_position = zip_longest(
            _summed([one.accepted_per_position for one in metrics]),
            _summed([one.drafted_per_position for one in metrics]),
            fillvalue=0,
        )
        shares = " ".join(f"{count / most:.0%}" for count, most in by_position)
        line += (
            f" ({accepted / drafted:.0%}; by position {shares}) in {rounds} rounds, "
            f"{1 + accepted / rounds:.2f} tokens a round with the bonus token"
        )
    return f"{line}; failed: {errors[0]}" if errors else line


def _summed(lists: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*lists, fillvalue=0)]
