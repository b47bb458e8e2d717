"""The options of `dovetail batch`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.commands.checks import check_writable, require, require_at_least

if TYPE_CHECKING:
    from dovetail.plugins.commands.batch.lines import Batch, BatchRequest
    from dovetail.plugins.commands.batch.runner import Server, Tally

app = typer.Typer(
    help="Answer files of requests in OpenAI's batch format.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
_INTERRUPTED = 130
_MOST_LINES = 20
"""Failures that are printed; all are in the output."""


@app.callback()
def _batch() -> None:
    """Answer files of requests in OpenAI's batch format."""


@app.command("run")
def run(
    input_file: Annotated[
        Path, typer.Option("--input-file", "--input", "-i", help="JSON lines: custom_id, method, url, body.")
    ],
    output_file: Annotated[Path, typer.Option("--output-file", "--output", "-o", help="JSON lines, as answers come.")],
    base_url: Annotated[
        str | None,
        typer.Option("--base-url", metavar="URL", help="Server, as in http://127.0.0.1:8000 (its own)."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Model of bodies that name none; without --base-url the one served.")
    ] = None,
    config: Annotated[str | None, typer.Option("--config", "-c", help="Config file of an own server.")] = None,
    options: Annotated[
        list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="Set one value of an own server's config.")
    ] = None,
    max_concurrency: Annotated[int, typer.Option("--max-concurrency", help="Most requests at a time.")] = 64,
    max_retries: Annotated[
        int, typer.Option("--max-retries", help="Of a request, after 408, 429, 500, 502 to 504, or a lost connection.")
    ] = 4,
    timeout: Annotated[float, typer.Option("--timeout", help="Longest wait for an answer in seconds.")] = 3600.0,
    resume: Annotated[bool, typer.Option("--resume", help="Leave out requests that the output has.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="--resume, with failed ones anew.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start the output anew.")] = False,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="Sent as a bearer token."),
    ] = None,
) -> None:
    """Send each line's body to its url on a server, and write the answers.

    Without --base-url a server is started for the batch, of --model, --config or the default model. Answers come in the
    order in which they are done. Ctrl-C leaves whole lines; --resume goes on. Lines that cannot be sent are reported
    with their numbers, and have an error in the output. Exits with 1 where a line was invalid or a request failed.
    """
    require_at_least("--max-concurrency", max_concurrency, 1)
    require_at_least("--max-retries", max_retries, 0)
    require(timeout > 0, f"--timeout {timeout}: give seconds, more than 0")
    is_own = base_url is None
    require(is_own or not (config or options), "--config and --option are of a server of its own: leave out --base-url")
    require(not (model and config) or not is_own, "--model and --config both say what is served: keep one")
    _check_output(output_file, input_file)
    from dovetail.commands.http import parse_base_url
    from dovetail.plugins.commands.batch.lines import read_batch
    from dovetail.plugins.commands.batch.own_server import BASE_URL, own_server
    from dovetail.plugins.commands.batch.runner import Server

    url = BASE_URL if base_url is None else parse_base_url("--base-url", base_url)
    batch = read_batch(input_file, None if is_own else model, needs_model=not is_own)
    for line in batch.invalid:
        typer.echo(f"{input_file}:{line.line}: {line.message}", err=True)
    done = _done_before(output_file, resume=resume, retry_failed=retry_failed, overwrite=overwrite)
    server = Server(url, api_key, timeout, max_concurrency, max_retries)
    left = [request for request in batch.requests if request.custom_id not in done]
    if is_own and left:
        with own_server(config or model, options or ()) as socket:
            code = _answer(batch, left, replace(server, uds=socket), output_file)
    else:
        code = _answer(batch, left, server, output_file)
    raise typer.Exit(code)


def _check_output(path: Path, input_file: Path) -> None:
    """Raises `ConfigError` for a file that cannot be written, or that is the input, by whatever link."""
    check_writable("--output", path)
    is_input = path.resolve() == input_file.resolve() or (
        path.exists() and input_file.exists() and path.samefile(input_file)
    )
    require(
        not is_input,
        f"--output {path} is the file of --input: answers would replace the requests; give another path",
    )


def _done_before(path: Path, *, resume: bool, retry_failed: bool, overwrite: bool) -> frozenset[str]:
    """custom_ids that the output has already. Raises `ConfigError` where nobody said what to do with them."""
    from dovetail.plugins.commands.batch.output import read_output

    require(not overwrite or not (resume or retry_failed), "--overwrite and --resume say different things: keep one")
    if not path.exists() or path.stat().st_size == 0:
        return frozenset()
    if overwrite:
        os.truncate(path, 0)
        return frozenset()
    require(
        resume or retry_failed,
        f"--output {path} has answers already: go on with --resume or --retry-failed, or start anew with --overwrite",
    )
    written = read_output(path, drop_failed=retry_failed)
    return written.answered | written.failed


def _answer(batch: Batch, left: Sequence[BatchRequest], server: Server, path: Path) -> int:
    """Sends what is left, and returns the exit code."""
    import asyncio

    from dovetail.commands.progress import Progress
    from dovetail.plugins.commands.batch.lines import invalid_line
    from dovetail.plugins.commands.batch.output import open_output
    from dovetail.plugins.commands.batch.runner import Tally, run_batch

    tally = Tally()
    was_interrupted = False
    with open_output(path) as output, Progress(len(left)) as progress:
        progress.show(path.name)
        for invalid in batch.invalid:
            output.append(invalid_line(invalid))
        try:
            asyncio.run(run_batch(server, left, output, tally, progress.advance))
        except KeyboardInterrupt:
            was_interrupted = True
    _report(batch, tally, len(batch.requests) - len(left))
    if was_interrupted:
        open_requests = len(left) - tally.answered - tally.failed
        typer.echo(f"interrupted with {open_requests} requests left: go on with --resume", err=True)
        return _INTERRUPTED
    return 1 if batch.invalid or tally.failed else 0


def _report(batch: Batch, tally: Tally, before: int) -> None:
    for line in tally.failures[:_MOST_LINES]:
        typer.echo(line, err=True)
    if (more := len(tally.failures) - _MOST_LINES) > 0:
        typer.echo(f"and {more} more, in the output", err=True)
    parts = [f"{tally.answered} answered", f"{tally.failed} failed", f"{len(batch.invalid)} invalid lines"]
    if before:
        parts.append(f"{before} were done before")
    parts.append(f"{tally.prompt_tokens:,} prompt and {tally.output_tokens:,} output tokens")
    typer.echo(", ".join(parts), err=True)
