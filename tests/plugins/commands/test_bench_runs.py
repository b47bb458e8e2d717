"""The measuring subcommands on a tiny model: what comes out, never how fast."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from dovetail.contracts.errors import ConfigError, DovetailError
from dovetail.plugins.commands.bench.cli import app
from dovetail.plugins.commands.bench.command import BenchCommand
from dovetail.plugins.commands.bench.result import Result, read_result
from dovetail.testing.story_model import save_story_model
from dovetail.testing.tiny_models import save_tiny_model, tiny_config


@pytest.fixture(scope="module")
def engine_options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, tiny_config("llama", vocab_size=256, max_position_embeddings=1100))
    options = ["model.tokenizer_mode=none", "cache.num_blocks=400", "executor.threads=1", "attention=sdpa"]
    return ["--model", str(folder), *(part for option in options for part in ("-o", option))]


def invoke(arguments: list[str], engine_options: list[str]) -> Any:
    return CliRunner().invoke(app, [*arguments, *engine_options])


def measure(tmp_path: Path, arguments: list[str], engine_options: list[str]) -> Result:
    out = tmp_path / "result.json"
    found = invoke([*arguments, "--json", str(out), "--html", str(tmp_path / "page.html")], engine_options)
    assert found.exit_code == 0, found.output + repr(found.exception)
    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page
    assert "<script" not in page
    assert "http" not in page.partition("<details>")[0]
    return read_result(out)


def test_latency_notes_every_token(tmp_path: Path, engine_options: list[str]) -> None:
    arguments = ["latency", "-b", "1", "-b", "3", "--input-len", "20", "--output-len", "5", "--repeats", "2"]
    result = measure(tmp_path, arguments, engine_options)
    assert list(result.workloads) == ["1x20+5", "3x20+5"]
    assert [len(request.tokens) for request in result.requests] == [5] * 8
    assert [len(group) for group in result.metrics["3x20+5/itl"].groups] == [12, 12]
    batch = [request for request in result.requests if request.workload == "3x20+5" and request.repetition == 1]
    assert result.metrics["3x20+5/e2e"].groups[1] == [max(request.tokens[-1] for request in batch)]
    assert all(request.cached_tokens == 0 for request in result.requests)
    assert result.config["values"]["model"]["max_model_len"] == 1100


def test_throughput_counts_tokens(tmp_path: Path, engine_options: list[str]) -> None:
    result = measure(tmp_path, ["throughput", "-w", "decode-1", "--repeats", "2", "--warmup", "0"], engine_options)
    metrics = {name.partition("/")[2]: metric for name, metric in result.metrics.items()}
    for seconds, rate in zip(metrics["total"].samples, metrics["output"].samples, strict=True):
        assert seconds * rate == pytest.approx(128)
    assert len(metrics["decode"].samples) == 2


def test_a_shared_prefix_is_cold_in_each_repetition_and_shared_within(
    tmp_path: Path, engine_options: list[str]
) -> None:
    sizes = ["--shared-prefix-len", "64", "--input-len", "72", "--output-len", "2", "-n", "4"]
    one_at_a_time = ["-o", "scheduler.max_num_seqs=1"]
    result = measure(tmp_path, ["throughput", *sizes, "--repeats", "2", *one_at_a_time], engine_options)
    for repetition in (0, 1):
        cached = [request.cached_tokens for request in result.requests if request.repetition == repetition]
        assert cached == [0, 64, 64, 64]


def test_data_sets_bring_their_own_prompts(tmp_path: Path, engine_options: list[str]) -> None:
    data = tmp_path / "set.jsonl"
    lines = [{"prompt_token_ids": [1, 2, 3], "output_tokens": 2, "id": "x"}, {"prompt_token_ids": [4]}]
    data.write_text("\n".join(map(json.dumps, lines)))
    result = measure(
        tmp_path, ["throughput", "--dataset", str(data), "--output-len", "3", "--repeats", "1"], engine_options
    )
    assert result.workloads["set.jsonl"]["output_tokens"] == [2, 3]
    assert [request.prompt_tokens for request in result.requests] == [3, 1]


def test_public_sets_are_read_in_their_own_shape(tmp_path: Path) -> None:
    save_story_model(tmp_path / "story")
    texts = ["Lily saw a big cat.", "The cat was happy. What did it play?"]
    data = tmp_path / "gsm8k.jsonl.gz"
    data.write_bytes(gzip.compress("\n".join(json.dumps({"question": text, "answer": "1"}) for text in texts).encode()))
    arguments = ["throughput", "--dataset", str(data), "--output-len", "2", "--repeats", "1"]
    result = measure(tmp_path, arguments, ["--model", str(tmp_path / "story"), "-o", "cache.num_blocks=100"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "story")
    assert [request.prompt_tokens for request in result.requests] == [len(tokenizer(text).input_ids) for text in texts]


def test_serving_keeps_the_cap_and_counts_the_wait(tmp_path: Path, engine_options: list[str]) -> None:
    arguments = [
        "online",
        "-n",
        "9",
        "--input-len",
        "12",
        "--output-len",
        "6",
        "--concurrency",
        "2",
        "--slo",
        "e2e=1e9",
    ]
    result = measure(tmp_path, arguments, engine_options)
    requests = result.requests
    assert [len(request.tokens) for request in requests] == [6] * 9
    for request in requests:
        others = [other for other in requests if other is not request]
        assert sum(other.sent <= request.sent < other.tokens[-1] for other in others) < 2
        assert request.sent <= (request.scheduled or 0.0) <= request.tokens[0]
    name = "9x12+6"
    assert result.metrics[f"{name}/slo met"].value == 1.0
    assert result.metrics[f"{name}/goodput"].samples == result.metrics[f"{name}/requests"].samples
    assert [len(group) for group in result.metrics[f"{name}/ttft"].groups] == [3, 3, 3]


def test_traces_say_when_and_what(tmp_path: Path, engine_options: list[str]) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n5.0,9,2\n5.1,5000,4\n5.2,7,3\n")
    result = measure(tmp_path, ["online", "--trace", str(trace), "--skip-too-long"], engine_options)
    sent = [(request.prompt_tokens, len(request.tokens)) for request in result.requests]
    assert sent == [(9, 2), (7, 3)]
    assert [request.arrival for request in result.requests] == pytest.approx([0.0, 0.2])
    refused = invoke(["online", "--trace", str(trace)], engine_options)
    assert "1 of 3 requests exceed max_model_len 1100" in str(refused.exception)


def test_start_up_is_the_sum_of_its_phases(tmp_path: Path, engine_options: list[str]) -> None:
    result = measure(tmp_path, ["startup", "--repeats", "1", "--warmup", "0"], engine_options)
    values = {name.partition("/")[2]: metric.value for name, metric in result.metrics.items()}
    assert values.pop("total") == pytest.approx(sum(values.values()))


def test_an_error_of_the_fresh_process_is_told(engine_options: list[str]) -> None:
    found = invoke(["startup", "-o", "scheduler=fcsf"], engine_options)
    assert isinstance(found.exception, DovetailError)
    assert "fcsf" in str(found.exception)
    assert "Traceback" not in str(found.exception)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["latency", "--input-len", "1000", "--output-len", "200"], "exceed max_model_len 1100"),
        (["latency", "--repeats", "0"], "--repeats is 0"),
        (["latency", "--json", "/nope/x.json"], "no folder /nope"),
        (["throughput", "-w", "decode"], "did you mean 'decode-1'"),
        (["throughput", "--text", "/nope.txt"], "--text /nope.txt: cannot be read"),
        (["online", "--rate", "0"], "--rate 0"),
        (["online", "--burstiness", "-1"], "--burstiness -1"),
        (["online", "--trace-speed", "2"], "need --trace"),
        (["online", "--trace", "/nope.csv", "--rate", "3"], "leave out --rate"),
        (["online", "--trace", "/nope.csv"], "cannot be read"),
        (["online", "--concurrency", "0"], "--concurrency is 0"),
    ],
)
def test_bad_input_is_told(arguments: list[str], words: str, engine_options: list[str]) -> None:
    found = invoke(arguments, engine_options)
    assert isinstance(found.exception, ConfigError), found.output
    assert words in str(found.exception)


def test_it_is_a_command() -> None:
    found = CliRunner().invoke(BenchCommand().app(), ["--help"])
    assert all(name in found.output for name in ("latency", "throughput", "serve", "startup", "compare"))
