"""Text to the terminal while it is generated."""

from __future__ import annotations

import sys
from dataclasses import replace

from dovetail.cli.errors import create_console
from dovetail.contracts.errors import DovetailError, RequestError
from dovetail.contracts.sampling import SamplingParams
from dovetail.engine.engine import LLMEngine
from dovetail.engine.input_processor import Prompt
from dovetail.outputs import RequestOutput


def stream(engine: LLMEngine, prompt: Prompt, params: SamplingParams) -> RequestOutput:
    """Completes one prompt, printing text as it comes; returns the last output, whose completion holds all text.

    Ctrl-C aborts the request and raises KeyboardInterrupt.
    """
    if params.num_sequences != 1:
        raise RequestError("several completions cannot be streamed to one terminal: use --json, or n=1")
    request_id = "terminal"
    engine.add_request(request_id, prompt, replace(params, output_kind="cumulative"))
    printed, last = 0, None
    try:
        while engine.has_unfinished_requests():
            for output in engine.step():
                text = output.outputs[0].text
                sys.stdout.write(text[printed:])
                sys.stdout.flush()
                printed, last = len(text), output
    except KeyboardInterrupt:
        engine.abort_request(request_id)
        raise
    finally:
        sys.stdout.write("\n")
    if last is None or last.error is not None:
        raise DovetailError(f"the request failed: {last.error if last is not None else 'nothing was generated'}")
    return last


def print_rates(output: RequestOutput) -> None:
    """One line about speed, on stderr."""
    metrics = output.metrics
    if metrics.first_token_time is None or metrics.finished_time is None:
        return
    generated = len(output.outputs[0].token_ids)
    decoding = metrics.finished_time - metrics.first_token_time
    rate = f", {(generated - 1) / decoding:.1f} tok/s" if generated > 1 and decoding > 0 else ""
    first = 1e3 * (metrics.first_token_time - metrics.arrival_time)
    create_console(stderr=True).print(
        f"[dim]{len(output.prompt_token_ids)} tokens in, {generated} out, first after {first:.0f} ms{rate}[/dim]"
    )
