"""The options of `dovetail bench`; each subcommand imports what it needs when it is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.commands.checks import check_writable, require, require_at_least, write_text
from dovetail.plugins.commands.bench.serve.cli import serve

if TYPE_CHECKING:
    from dovetail.plugins.commands.bench.result import Result

app = typer.Typer(
    help="Measure latency, throughput, serving and start-up, and compare results.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Model = Annotated[str | None, typer.Option("--model", help="Sets model.path (default: the embedded model).")]
Config = Annotated[
    str | None,
    typer.Option("--config", "-c", metavar="CONFIG", help="Config file (YAML, TOML, JSON) or the manifest of a run."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--option", "-o", metavar="KEY=VALUE", help="Set one value, as in -o attention=sdpa. Repeat for more."
    ),
]
Repeats = Annotated[int, typer.Option("--repeats", help="Timed repetitions.")]
Warmup = Annotated[int, typer.Option("--warmup", help="Repetitions before them, dropped.")]
NeighbourCount = Annotated[int, typer.Option("--neighbours", help="Processes that compute at the same time.")]
NeighbourThreads = Annotated[int, typer.Option("--neighbour-threads", help="Threads of each neighbour process.")]
Seed = Annotated[int, typer.Option("--seed", help="Random seed of where prompts begin in the text, and of arrivals.")]
Text = Annotated[Path | None, typer.Option("--text", help="Text file to cut prompts from (default: a bundled story).")]
Dataset = Annotated[
    Path | None,
    typer.Option(
        "--dataset",
        help='JSON lines: {"prompt": ...} or {"prompt_token_ids": ...}, optionally "output_tokens"; or Spec-Bench, '
        "MT-Bench, HumanEval, GSM8K.",
    ),
]
Names = Annotated[
    list[str] | None,
    typer.Option(
        "--workload", "-w", help="decode-1, prefill-1024, batch-32, shared-prefix-64, or all. Repeat for more."
    ),
]
BatchSizes = Annotated[
    list[int] | None,
    typer.Option("--batch-size", "-b", "--num-requests", "-n", help="Requests per batch (1). Repeat for more."),
]
NumRequests = Annotated[int | None, typer.Option("--num-requests", "-n", help="Requests; with a file, at most.")]
InputLen = Annotated[int | None, typer.Option("--input-len", help="Prompt tokens per request (128).")]
OutputLen = Annotated[int | None, typer.Option("--output-len", help="Output tokens per request (128).")]
SharedLen = Annotated[int | None, typer.Option("--shared-prefix-len", help="Prompt tokens that all requests share.")]
Rate = Annotated[str, typer.Option("--rate", help="Requests per second, or inf: all at once.")]
Burstiness = Annotated[
    float,
    typer.Option("--burstiness", help="Shape of the gaps' gamma distribution; 1: Poisson, less: bursts, inf: equal."),
]
Concurrency = Annotated[int | None, typer.Option("--concurrency", help="Most requests in the engine at a time.")]
Levels = Annotated[
    list[str] | None, typer.Option("--slo", metavar="NAME=MS", help="Limit of ttft, itl, tpot or e2e. Repeat for more.")
]
Trace = Annotated[Path | None, typer.Option("--trace", help="CSV or JSONL: TIMESTAMP, ContextTokens, GeneratedTokens.")]
TraceSpeed = Annotated[float, typer.Option("--trace-speed", help="2: arrivals come twice as fast.")]
SkipTooLong = Annotated[
    bool, typer.Option("--skip-too-long", help="Leave out the trace's requests that the model cannot hold.")
]
OneName = Annotated[str | None, typer.Option("--workload", "-w", help="A workload of `bench throughput`.")]
JSONFile = Annotated[Path | None, typer.Option("--json", help="Write every sample, machine and config to this file.")]
HTMLFile = Annotated[Path | None, typer.Option("--html", help="Write one page with plots, readable offline.")]


@app.command("latency")
def latency(
    model: Model = None,
    config: Config = None,
    overrides: Overrides = None,
    batch_size: BatchSizes = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    text: Text = None,
    seed: Seed = 0,
    repeats: Repeats = 5,
    warmup: Warmup = 1,
    neighbours: NeighbourCount = 0,
    neighbour_threads: NeighbourThreads = 1,
    json_file: JSONFile = None,
    html_file: HTMLFile = None,
) -> None:
    """One batch at a time: end-to-end latency, TTFT, ITL, TPOT, prefill and decode rates.

    Repeat --batch-size for several sizes. Greedy, end of sequence ignored.
    """
    _check_outputs(json_file, html_file)
    from dovetail.plugins.commands.bench.selection import (
        EngineChoice,
        Procedure,
        SizeOptions,
        choose_load,
        sized_workload,
    )

    lengths = (128 if input_len is None else input_len, 128 if output_len is None else output_len)
    workloads = [sized_workload(size, *lengths) for size in dict.fromkeys(batch_size or [1])]
    choice = choose_load((), None, text, SizeOptions(None, None, None, None), seed, workloads)
    procedure = Procedure(repeats, warmup, neighbours, neighbour_threads).checked()
    from dovetail.plugins.commands.bench.offline import run_latency

    engine = EngineChoice(model, config, tuple(overrides or ()))
    _publish(run_latency(engine, choice, procedure), json_file, html_file)


@app.command("throughput")
def throughput(
    model: Model = None,
    config: Config = None,
    overrides: Overrides = None,
    workload: Names = None,
    dataset: Dataset = None,
    num_requests: NumRequests = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    shared_prefix_len: SharedLen = None,
    text: Text = None,
    seed: Seed = 0,
    repeats: Repeats = 3,
    warmup: Warmup = 1,
    neighbours: NeighbourCount = 0,
    neighbour_threads: NeighbourThreads = 1,
    json_file: JSONFile = None,
    html_file: HTMLFile = None,
) -> None:
    """All requests at once through `LLM.generate`: tokens and requests per second.

    Workloads: decode-1 (1 x 32 in, 128 out), prefill-1024 (1 x 1,024 in, 1 out), batch-32 (32 x 128 in, 128 out),
    shared-prefix-64 (64 x 512 common + 16 own in, 64 out). Without any option that says what to run, all four.
    The prefix cache is emptied before each repetition. Greedy, end of sequence ignored.
    """
    _check_outputs(json_file, html_file)
    from dovetail.plugins.commands.bench.selection import EngineChoice, Procedure, SizeOptions, choose_load
    from dovetail.plugins.commands.bench.workloads import NAMED

    sizes = SizeOptions(num_requests, input_len, output_len, shared_prefix_len)
    choice = choose_load(workload or (), dataset, text, sizes, seed, list(NAMED.values()))
    procedure = Procedure(repeats, warmup, neighbours, neighbour_threads).checked()
    from dovetail.plugins.commands.bench.offline import run_throughput

    engine = EngineChoice(model, config, tuple(overrides or ()))
    _publish(run_throughput(engine, choice, procedure), json_file, html_file)


@app.command("online")
def online(
    model: Model = None,
    config: Config = None,
    overrides: Overrides = None,
    rate: Rate = "inf",
    burstiness: Burstiness = 1.0,
    concurrency: Concurrency = None,
    slo: Levels = None,
    trace: Trace = None,
    trace_speed: TraceSpeed = 1.0,
    skip_too_long: SkipTooLong = False,
    workload: OneName = None,
    dataset: Dataset = None,
    num_requests: NumRequests = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    shared_prefix_len: SharedLen = None,
    text: Text = None,
    seed: Seed = 0,
    repeats: Repeats = 1,
    warmup: Annotated[int, typer.Option("--warmup", help="Requests that run before, dropped.")] = 4,
    neighbours: NeighbourCount = 0,
    neighbour_threads: NeighbourThreads = 1,
    json_file: JSONFile = None,
    html_file: HTMLFile = None,
) -> None:
    """Requests over time through AsyncLLMEngine, in this process: latencies, queueing, goodput.

    What is measured is the engine as a server drives it, without HTTP, in one process with its client; `bench serve`
    measures a server. Without any option that says what to send, 32 requests of 128 tokens in and 128 out.
    """
    _check_outputs(json_file, html_file)
    from dovetail.plugins.commands.bench.online_options import OnlineOptions
    from dovetail.plugins.commands.bench.selection import EngineChoice, Procedure, SizeOptions

    sizes = SizeOptions(num_requests, input_len, output_len, shared_prefix_len)
    options = OnlineOptions(
        rate,
        burstiness,
        concurrency,
        slo or (),
        trace,
        trace_speed,
        skip_too_long,
        workload,
        dataset,
        text,
        sizes,
        seed,
    )
    choice, traffic = options.choose()
    procedure = Procedure(repeats, warmup, neighbours, neighbour_threads).checked()
    from dovetail.plugins.commands.bench.online import run_online

    engine = EngineChoice(model, config, tuple(overrides or ()))
    _publish(run_online(engine, choice, traffic, procedure), json_file, html_file)


app.command("serve")(serve)


@app.command("startup")
def startup(
    model: Model = None,
    config: Config = None,
    overrides: Overrides = None,
    repeats: Repeats = 5,
    warmup: Warmup = 1,
    json_file: JSONFile = None,
    html_file: HTMLFile = None,
) -> None:
    """From the start of a process to its first token, in fresh processes, by phase."""
    _check_outputs(json_file, html_file)
    from dovetail.plugins.commands.bench.selection import EngineChoice, Procedure

    procedure = Procedure(repeats, warmup).checked()
    from dovetail.plugins.commands.bench.startup import run_startup

    engine = EngineChoice(model, config, tuple(overrides or ()))
    _publish(run_startup(engine, procedure), json_file, html_file)


@app.command("compare")
def compare_results(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="The result to compare with.")],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="The result that is judged.")],
    allow: Annotated[bool, typer.Option("--allow", help="Compare what different workloads have in common.")] = False,
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", help="Only this metric: decode-1/ttft, or ttft of all workloads. Repeat for more."),
    ] = None,
    statistic: Annotated[
        str | None, typer.Option("--statistic", help="mean, median, p90, p95 or p99 instead of each metric's own.")
    ] = None,
    fail_if_slower: Annotated[
        float | None,
        typer.Option("--fail-if-slower", metavar="SHARE", help="Exit with 1 if B is slower by more, as in 0.05."),
    ] = None,
    json_file: JSONFile = None,
    html_file: HTMLFile = None,
) -> None:
    """Two results side by side: ratios, their 95% intervals, and a verdict per metric.

    --fail-if-slower fails on metrics whose interval excludes 1 and whose ratio is worse by more than the share given.
    """
    _check_outputs(json_file, html_file)
    known = ("mean", "median", "p90", "p95", "p99")
    require(statistic is None or statistic in known, f"--statistic {statistic}: give one of {', '.join(known)}")
    if fail_if_slower is not None:
        require_at_least("--fail-if-slower", fail_if_slower, 0)
    from dovetail.plugins.commands.bench.compare import compare
    from dovetail.plugins.commands.bench.page import comparison_page
    from dovetail.plugins.commands.bench.result import read_result
    from dovetail.plugins.commands.bench.terminal import print_comparison

    found = compare(
        read_result(a), read_result(b), (str(a), str(b)), allow=allow, metrics=metric or (), statistic=statistic
    )
    print_comparison(found)
    if json_file is not None:
        write_text("--json", json_file, json.dumps(found.as_data(), indent=1) + "\n")
    if html_file is not None:
        write_text("--html", html_file, comparison_page(found))
    if fail_if_slower is None:
        return
    require(
        any(row.interval is not None for row in found.rows),
        "--fail-if-slower cannot decide anything: no metric was repeated often enough for an interval; measure with"
        " more --repeats",
    )
    if slower := found.slower_than(fail_if_slower):
        typer.echo(f"slower by more than {fail_if_slower:.1%}: {', '.join(row.name for row in slower)}", err=True)
        raise typer.Exit(1)


def _check_outputs(json_file: Path | None, html_file: Path | None) -> None:
    check_writable("--json", json_file)
    check_writable("--html", html_file)


def _publish(result: Result, json_file: Path | None, html_file: Path | None) -> None:
    from dovetail.plugins.commands.bench.page import result_page
    from dovetail.plugins.commands.bench.result import write_json
    from dovetail.plugins.commands.bench.terminal import print_result

    if json_file is not None:
        write_text("--json", json_file, write_json(result))
    if html_file is not None:
        write_text("--html", html_file, result_page(result))
    print_result(result)
