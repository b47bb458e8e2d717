"""The options of `bench serve`, by vLLM's names where it has them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

BaseURLs = Annotated[
    list[str],
    typer.Option("--base-url", metavar="URL", help="Server, as in http://127.0.0.1:8000. Repeat to compare several."),
]
Models = Annotated[
    list[str] | None,
    typer.Option("--model", help="Model by the server's name (default: the first it lists); one, or one per server."),
]
Labels = Annotated[
    list[str] | None, typer.Option("--label", help="Name of a server in results, one per --base-url (host and port).")
]
Endpoint = Annotated[str, typer.Option("--endpoint", help="completions or chat, or the path, /v1/chat/completions.")]
DatasetName = Annotated[
    str | None,
    typer.Option(
        "--dataset-name",
        help="random: random token ids; text: cut from a text; sonnet; sharegpt; custom: JSON lines as of `bench"
        " throughput`; trace (azure, mooncake): arrivals and lengths of a CSV or JSONL file. Default: random, or custom"
        " with --dataset-path.",
    ),
]
DatasetPath = Annotated[Path | None, typer.Option("--dataset-path", help="File of the data set.")]
Text = Annotated[Path | None, typer.Option("--text", help="Text that a trace's prompts are cut from (bundled story).")]
NumPrompts = Annotated[int, typer.Option("--num-prompts", help="Requests; of a file, at most.")]
InputLen = Annotated[
    int | None, typer.Option("--input-len", "--random-input-len", "--sonnet-input-len", help="Prompt tokens.")
]
OutputLen = Annotated[
    int | None,
    typer.Option(
        "--output-len",
        "--random-output-len",
        "--sonnet-output-len",
        "--sharegpt-output-len",
        "--custom-output-len",
        help="Most output tokens, of requests that do not say.",
    ),
]
PrefixLen = Annotated[
    int | None,
    typer.Option(
        "--prefix-len",
        "--random-prefix-len",
        "--sonnet-prefix-len",
        help="Prompt tokens that all requests share: before --input-len, of a sonnet within it.",
    ),
]
RangeRatio = Annotated[
    float | None,
    typer.Option("--range-ratio", "--random-range-ratio", help="Lengths vary by this share up and down, as in 0.2."),
]
TraceSpeed = Annotated[float, typer.Option("--trace-speed", help="2: a trace's arrivals come twice as fast.")]
MaxTotal = Annotated[
    int | None,
    typer.Option("--max-total-tokens", help="Leave out a trace's requests with more prompt and output tokens."),
]
TokenizerName = Annotated[
    str | None, typer.Option("--tokenizer", help="Folder of the model's tokenizer, or `server`: by its /tokenize.")
]
VocabSize = Annotated[int | None, typer.Option("--vocab-size", help="Random token ids below this, in place of text.")]
SendText = Annotated[bool, typer.Option("--send-text", help="Send token ids as text, to servers that take no ids.")]
RequestRate = Annotated[str, typer.Option("--request-rate", help="Requests per second, or inf: all at once.")]
Burstiness = Annotated[
    float, typer.Option("--burstiness", help="Shape of the gaps' gamma distribution; 1: Poisson, inf: equal gaps.")
]
BurstSize = Annotated[int, typer.Option("--burst-size", help="Requests that come together each time.")]
MaxConcurrency = Annotated[
    int | None, typer.Option("--max-concurrency", help="Most requests in flight to a server; others wait.")
]
NumWarmups = Annotated[int, typer.Option("--num-warmups", help="Requests that run before on each server, dropped.")]
TurnSize = Annotated[
    int | None,
    typer.Option(
        "--turn-size",
        help="With several servers: prompts that go to one server, then to the next (a 30th of all, at least"
        " --max-concurrency).",
    ),
]
IgnoreEOS = Annotated[bool, typer.Option("--ignore-eos", help="Ask for all output tokens, past the end of sequence.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Nucleus sampling.")]
SamplingSeed = Annotated[int | None, typer.Option("--sampling-seed", help="The seed field of each request.")]
ExtraBody = Annotated[str | None, typer.Option("--extra-body", metavar="JSON", help="More fields of each request.")]
Headers = Annotated[list[str] | None, typer.Option("--header", metavar="NAME=VALUE", help="Repeat for more.")]
APIKey = Annotated[
    str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="Sent as a bearer token.")
]
Timeout = Annotated[float, typer.Option("--timeout", help="Longest silence of a server in seconds.")]
Goodput = Annotated[
    list[str] | None,
    typer.Option("--goodput", metavar="NAME:MS", help="Limit of ttft, itl, tpot or e2el. Repeat, or write commas."),
]
PercentileMetrics = Annotated[str, typer.Option("--percentile-metrics", help="Latencies that are shown.")]
MetricPercentiles = Annotated[str, typer.Option("--metric-percentiles", help="Percentiles that are shown.")]
SaveResult = Annotated[bool, typer.Option("--save-result", help="As --json, with a name of its own.")]
ResultDir = Annotated[Path, typer.Option("--result-dir", help="Folder of --save-result.")]
ResultFilename = Annotated[str | None, typer.Option("--result-filename", help="File of --save-result.")]
RequestsFile = Annotated[Path | None, typer.Option("--requests", help="Write one JSON line per request to this file.")]
Seed = Annotated[int, typer.Option("--seed", help="Random seed of prompts and arrivals.")]
JSONFile = Annotated[Path | None, typer.Option("--json", help="Write every sample to this file.")]
HTMLFile = Annotated[Path | None, typer.Option("--html", help="Write one page with plots, readable offline.")]


def serve(
    base_url: BaseURLs,
    model: Models = None,
    label: Labels = None,
    endpoint: Endpoint = "completions",
    dataset_name: DatasetName = None,
    dataset_path: DatasetPath = None,
    text: Text = None,
    num_prompts: NumPrompts = 1000,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    prefix_len: PrefixLen = None,
    range_ratio: RangeRatio = None,
    trace_speed: TraceSpeed = 1.0,
    max_total_tokens: MaxTotal = None,
    tokenizer: TokenizerName = None,
    vocab_size: VocabSize = None,
    send_text: SendText = False,
    request_rate: RequestRate = "inf",
    burstiness: Burstiness = 1.0,
    burst_size: BurstSize = 1,
    max_concurrency: MaxConcurrency = None,
    num_warmups: NumWarmups = 4,
    turn_size: TurnSize = None,
    ignore_eos: IgnoreEOS = False,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    sampling_seed: SamplingSeed = None,
    extra_body: ExtraBody = None,
    header: Headers = None,
    api_key: APIKey = None,
    timeout: Timeout = 600.0,
    goodput: Goodput = None,
    percentile_metrics: PercentileMetrics = "ttft,tpot,itl,e2el",
    metric_percentiles: MetricPercentiles = "90,99",
    save_result: SaveResult = False,
    result_dir: ResultDir = Path(),
    result_filename: ResultFilename = None,
    requests_file: RequestsFile = None,
    seed: Seed = 0,
    json_file: JSONFile = None,
    html_file: HTMLFile = None,
) -> None:
    """Requests over time to any server of OpenAI's API: latencies, rates, goodput, failures by kind.

    With several --base-url, the same prompts go to one server after the other by turns, and the ratios of their
    latencies have 95% intervals. Exits with 1 where no request succeeded.
    """
    given = dict(locals())
    from dovetail.plugins.commands.bench.serve.run import ServeOptions, run

    run(ServeOptions(**given))
