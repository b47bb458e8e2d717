"""What `bench serve` does with its options."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import typer

from dovetail.commands.checks import check_writable, require, write_text
from dovetail.plugins.commands.bench.page import result_page
from dovetail.plugins.commands.bench.result import Result, write_json
from dovetail.plugins.commands.bench.serve.loads import LoadOptions
from dovetail.plugins.commands.bench.serve.planning import Sizes, create_plan, find_targets
from dovetail.plugins.commands.bench.serve.report import create_result, write_requests
from dovetail.plugins.commands.bench.serve.session import Connection, measure, run_async
from dovetail.plugins.commands.bench.serve.settings import (
    parse_form,
    parse_goodput,
    parse_headers,
    parse_servers,
    parse_shown,
    parse_traffic,
)
from dovetail.plugins.commands.bench.terminal import print_served


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of the command line, by the names of its parameters."""

    base_url: list[str]
    model: list[str] | None
    label: list[str] | None
    endpoint: str
    dataset_name: str | None
    dataset_path: Path | None
    text: Path | None
    num_prompts: int
    input_len: int | None
    output_len: int | None
    prefix_len: int | None
    range_ratio: float | None
    trace_speed: float
    max_total_tokens: int | None
    tokenizer: str | None
    vocab_size: int | None
    send_text: bool
    request_rate: str
    burstiness: float
    burst_size: int
    max_concurrency: int | None
    num_warmups: int
    turn_size: int | None
    ignore_eos: bool
    temperature: float
    top_p: float | None
    sampling_seed: int | None
    extra_body: str | None
    header: list[str] | None
    api_key: str | None
    timeout: float
    goodput: list[str] | None
    percentile_metrics: str
    metric_percentiles: str
    save_result: bool
    result_dir: Path
    result_filename: str | None
    requests_file: Path | None
    seed: int
    json_file: Path | None
    html_file: Path | None


def run(options: ServeOptions) -> None:
    """Measures, prints and writes. Raises `ConfigError` for options that do not go together, `typer.Exit` where no
    request succeeded."""
    json_file = _result_file(options)
    for option, path in (("--json", json_file), ("--html", options.html_file), ("--requests", options.requests_file)):
        check_writable(option, path)
    levels, shown = (
        parse_goodput(options.goodput or ()),
        parse_shown(options.percentile_metrics, options.metric_percentiles),
    )
    name = options.dataset_name or ("random" if options.dataset_path is None else "custom")
    sizes = (options.num_prompts, options.input_len, options.output_len, options.prefix_len, options.range_ratio)
    load = LoadOptions(
        name,
        options.dataset_path,
        options.text,
        *sizes,
        options.trace_speed,
        options.max_total_tokens,
        options.vocab_size,
        options.seed,
    ).checked()
    form = parse_form(
        options.endpoint,
        options.ignore_eos,
        options.temperature,
        options.top_p,
        options.sampling_seed,
        options.extra_body,
    )
    traffic = parse_traffic(
        options.request_rate,
        options.burstiness,
        options.burst_size,
        options.max_concurrency,
        options.seed,
        is_trace=load.is_trace,
    )
    require(options.timeout > 0, f"--timeout {options.timeout}: give seconds, more than 0")
    connection = Connection(options.api_key, parse_headers(options.header or ()), options.timeout)
    servers = parse_servers(options.base_url, options.label or ())
    counts = Sizes(options.num_warmups, options.turn_size).checked(len(servers))
    targets = run_async(find_targets(connection, servers, options.model or ()))
    planned = create_plan(
        targets, load, form, traffic, connection, options.tokenizer, counts, send_text=options.send_text
    )
    measured = run_async(measure(planned.plan, connection))
    if options.requests_file is not None:
        write_requests(options.requests_file, measured)
    result = create_result(planned.plan, measured, levels, planned.described, planned.warnings)
    _write(result, json_file, options.html_file)
    print_served(result, shown.metrics, shown.percentiles)
    if not result.requests:
        raise typer.Exit(1)


def _write(result: Result, json_file: Path | None, html_file: Path | None) -> None:
    if json_file is not None:
        write_text("--json", json_file, write_json(result))
    if html_file is not None:
        write_text("--html", html_file, result_page(result))


def _result_file(options: ServeOptions) -> Path | None:
    if not options.save_result:
        is_named = options.result_filename is not None or options.result_dir != Path()
        require(not is_named, "--result-dir and --result-filename need --save-result")
        return options.json_file
    require(options.json_file is None, "--json and --save-result both name the result's file: keep one")
    return options.result_dir / (options.result_filename or f"serve-{datetime.now(UTC):%Y%m%d-%H%M%S}.json")
