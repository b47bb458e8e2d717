"""`bench serve` against a scripted server on a real socket: what is sent, what is counted, what is told."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from dovetail.contracts.errors import ConfigError, DovetailError
from dovetail.plugins.commands.bench.cli import app
from dovetail.plugins.commands.bench.compare import compare
from dovetail.plugins.commands.bench.result import FailedRequests, Result, read_result
from dovetail.plugins.commands.bench.serve import session
from dovetail.plugins.commands.bench.serve.loads import DATASETS
from dovetail.plugins.commands.bench.serve.sse import EventReader

SMALL = ["--vocab-size", "50", "--input-len", "6", "--output-len", "5", "--num-prompts", "9", "--num-warmups", "0"]


def invoke(arguments: list[str]) -> Any:
    return CliRunner().invoke(app, ["serve", *arguments])


def measure(tmp_path: Path, arguments: list[str]) -> tuple[Result, list[dict[str, Any]]]:
    files = ["--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
    log = tmp_path / "log.jsonl"
    found = invoke([*arguments, *files, "--requests", str(log)])
    assert found.exit_code == 0, found.output + repr(found.exception)
    assert "<script" not in (tmp_path / "r.html").read_text()
    return read_result(tmp_path / "r.json"), [json.loads(line) for line in log.read_text().splitlines()]


def texts_file(tmp_path: Path, texts: list[str], **more: Any) -> list[str]:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": text, **more}) for text in texts))
    return ["--dataset-path", str(file), "--num-warmups", "0", "--output-len", "5"]


@pytest.mark.parametrize(
    ("model", "counted_by", "arrivals", "tokens"),
    [
        ("running", "running usage", 5, 5),
        ("running-pairs", "running usage", 5, 5),
        ("usage", "usage", 5, 5),
        ("usage-pairs", "usage", 3, 5),
        ("plain", "chunks", 5, 5),
        ("plain-pairs", "chunks", 3, 3),
        ("usage-strict", "chunks", 5, 5),
        ("running-halves-crlf", "running usage", 5, 5),
    ],
)
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_tokens_are_counted_by_the_best_that_the_server_says(
    tmp_path: Path, server: Any, model: str, counted_by: str, arrivals: int, tokens: int, endpoint: str
) -> None:
    data = texts_file(tmp_path, ["one", "two", "three"])
    result, log = measure(tmp_path, ["--base-url", server.url, "--model", model, "--endpoint", endpoint, *data])
    assert [line["counted_by"] for line in log] == [counted_by] * 3
    assert [len(request.tokens) for request in result.requests] == [arrivals] * 3
    assert [line["output_tokens"] for line in log] == [tokens] * 3
    assert [line["text"] for line in log] == ["<0><1><2><3><4>"] * 3
    assert result.client["tokens_counted_by"][server.url.removeprefix("http://")] == {counted_by: 3}


def test_running_usage_puts_the_tokens_of_a_chunk_at_one_time(tmp_path: Path, server: Any) -> None:
    data = texts_file(tmp_path, ["one"])
    result, _ = measure(tmp_path, ["--base-url", server.url, "--model", "running-pairs", *data])
    gaps = result.requests[0].gaps
    assert (gaps[0], gaps[2]) == (0.0, 0.0)
    assert gaps[1] > 0
    assert gaps[3] > 0


def test_a_prompt_is_counted_by_the_server_and_cached_tokens_too(tmp_path: Path, server: Any) -> None:
    result, _ = measure(tmp_path, ["--base-url", server.url, "--model", "usage", *SMALL])
    assert {(request.prompt_tokens, request.cached_tokens) for request in result.requests} == {(9, 4)}
    result, _ = measure(tmp_path, ["--base-url", server.url, "--model", "plain", *SMALL])
    assert {(request.prompt_tokens, request.cached_tokens) for request in result.requests} == {(6, 0)}


FAULTS = {
    "500": "http 500",
    "429": "http 429",
    "cut": "broken",
    "unended": "broken",
    "told": "error event",
    "garbage": "bad event",
    "nothing": "no tokens",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_failed_requests_are_counted_by_kind_and_never_dropped(tmp_path: Path, server: Any, fault: str) -> None:
    data = texts_file(tmp_path, ["fine", "fault 1", "fine too", "fault 2"])
    arguments = ["--base-url", server.url, "--model", f"usage-{fault}", *data, "--goodput", "e2el:1e9"]
    result, log = measure(tmp_path, arguments)
    (failed,) = result.failures["prompts.jsonl"]
    assert (failed.kind, failed.count) == (FAULTS[fault], 2)
    assert [line["error"] and line["error"]["kind"] for line in log] == [None, FAULTS[fault], None, FAULTS[fault]]
    assert len(result.requests) == 2
    assert result.metrics["prompts.jsonl/slo met"].samples == [1.0, 0.0, 1.0, 0.0]
    rates = {name: result.metrics[f"prompts.jsonl/{name}"].samples[0] for name in ("requests", "goodput", "output")}
    assert rates["requests"] == rates["goodput"]
    assert rates["output"] == pytest.approx(5 * rates["requests"])
    shown = invoke(arguments)
    assert "2 requests failed" in shown.stderr
    assert f"2 x {FAULTS[fault]}: {' '.join(failed.message.split())}" in shown.stderr.replace("\n", " ")


def test_each_kind_of_failure_is_one_line_with_its_count_and_what_was_told(tmp_path: Path, server: Any) -> None:
    data = texts_file(tmp_path, ["fine", *(f"fault {number}" for number in range(30))])
    refused = ("429", "500")

    def change(body: dict[str, Any]) -> None:
        if "fault" in body["prompt"]:
            body["model"] = refused[int(body["prompt"].split()[1]) % 3 == 0]

    server.on_request = change
    found = invoke(["--base-url", server.url, "--model", "usage", *data])
    assert found.exit_code == 0
    assert "30 requests failed; latencies are of the others" in found.stderr
    assert found.stderr.count("20 x http 429: too many") == 1
    assert found.stderr.count("10 x http 500: it broke") == 1
    assert found.stderr.count(" x http ") == 2


def test_a_server_that_falls_silent_is_not_waited_for(
    tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_usage = session._ask_usage

    async def ask_patiently(client: httpx.AsyncClient, *more: Any) -> Any:
        """The short request of the beginning is answered, and may take its time."""
        short, client.timeout = client.timeout, httpx.Timeout(60)
        usage = await ask_usage(client, *more)
        client.timeout = short
        return usage

    monkeypatch.setattr(session, "_ask_usage", ask_patiently)
    data = texts_file(tmp_path, ["fault"])
    found = invoke(["--base-url", server.url, "--model", "usage-hang", *data, "--timeout", "0.5"])
    assert found.exit_code == 1
    assert "1 x timeout: " in found.stderr


def test_results_of_two_servers_are_of_one_workload(tmp_path: Path, server: Any, other_server: Any) -> None:
    one, _ = measure(tmp_path, ["--base-url", server.url, "--model", "running", *SMALL])
    other, _ = measure(tmp_path, ["--base-url", other_server.url, "--model", "usage", *SMALL])
    rows = {row.name for row in compare(one, other).rows}
    assert {"random/ttft", "random/tpot", "random/itl", "random/e2e", "random/output"} <= rows
    more, _ = measure(tmp_path, ["--base-url", server.url, *SMALL, "--seed", "1"])
    with pytest.raises(ConfigError, match="prompts_sha256"):
        compare(one, more)


def test_what_the_server_says_of_a_failure_is_kept(tmp_path: Path, server: Any) -> None:
    data = texts_file(tmp_path, ["fine", "fault"])
    _, log = measure(tmp_path, ["--base-url", server.url, "--model", "500", *data])
    assert log[1]["error"] == {"kind": "http 500", "message": "it broke"}


def test_no_request_that_succeeds_exits_with_1(tmp_path: Path, server: Any) -> None:
    # The one token that is asked for before goes to "Hello".
    found = invoke(["--base-url", server.url, "--model", "500", *texts_file(tmp_path, ["fault"])])
    assert found.exit_code == 1
    assert "1 x http 500: it broke" in found.stderr


def test_the_cap_is_kept_and_the_wait_counts(tmp_path: Path, server: Any) -> None:
    result, log = measure(tmp_path, ["--base-url", server.url, "--model", "usage", *SMALL, "--max-concurrency", "2"])
    assert server.most_in_flight <= 2
    assert [line["arrival_s"] for line in log] == [0.0] * 9
    for request, line in zip(result.requests, log, strict=True):
        assert request.ttft == pytest.approx(request.tokens[0])
        assert request.tokens[0] - request.sent in result.metrics["random/ttft sent"].samples
        assert line["ttft_s"] == request.ttft
        running = [other for other in log if other["sent_s"] < line["sent_s"] < other["ended_s"]]
        assert len(running) < 2


@pytest.mark.parametrize(
    ("options", "gaps"),
    [
        (["--burstiness", "inf"], [0.01] * 8),
        (["--burstiness", "inf", "--burst-size", "3"], [0, 0, 0.03, 0, 0, 0.03, 0, 0]),
    ],
)
def test_requests_come_when_the_rate_says(tmp_path: Path, server: Any, options: list[str], gaps: list[float]) -> None:
    arguments = ["--base-url", server.url, "--model", "usage", *SMALL, "--request-rate", "100", *options]
    _, log = measure(tmp_path, arguments)
    assert [b["arrival_s"] - a["arrival_s"] for a, b in pairwise(log)] == pytest.approx(gaps)
    assert all(line["sent_s"] >= line["arrival_s"] for line in log)


def test_the_body_has_what_was_asked_for(tmp_path: Path, server: Any) -> None:
    options = ["--ignore-eos", "--top-p", "0.5", "--sampling-seed", "3", "--extra-body", '{"top_k": 7}']
    key = ["--api-key", "secret", "--header", "X-Test=yes"]
    measure(tmp_path, ["--base-url", f"{server.url}/v1/", *texts_file(tmp_path, ["one"]), *options, *key])
    assert server.bodies[-1] == {
        "model": "usage",
        "prompt": "one",
        "max_tokens": 5,
        "temperature": 0.0,
        "top_p": 0.5,
        "seed": 3,
        "ignore_eos": True,
        "top_k": 7,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    assert server.headers[-1]["authorization"] == "Bearer secret"
    assert server.headers[-1]["x-test"] == "yes"


def test_warm_ups_have_prompts_of_their_own_and_are_left_out(tmp_path: Path, server: Any) -> None:
    arguments = ["--base-url", server.url, "--model", "usage", *SMALL, "--num-warmups", "3"]
    _, log = measure(tmp_path, arguments)
    prompts = [tuple(body["prompt"]) for body in server.bodies if len(body["prompt"]) == 6]
    assert len(prompts) == len(set(prompts)) == 12
    assert len(log) == 9
    again, _ = measure(tmp_path, ["--base-url", server.url, "--model", "usage", *SMALL])
    assert {tuple(body["prompt"]) for body in server.bodies[-9:]} == set(prompts[3:])
    assert again.workloads["random"]["requests"] == 9


def test_servers_take_turns_on_the_same_prompts(tmp_path: Path, server: Any, other_server: Any) -> None:
    order: list[tuple[str, str]] = []
    server.on_request = lambda body: order.append(("a", str(body["prompt"])))
    other_server.on_request = lambda body: order.append(("b", str(body["prompt"])))
    two = ["--base-url", server.url, "--base-url", other_server.url, "--label", "a", "--label", "b"]
    options = ["--model", "running", "--model", "usage", "--turn-size", "2", "--max-concurrency", "1"]
    result, log = measure(tmp_path, [*two, *options, *SMALL])
    measured = order[2:]  # One token of each server comes first.
    assert "".join(name for name, _ in measured) == "aabb" + "bbaa" + "aabb" + "bbaa" + "ab"
    by_server = {name: [prompt for own, prompt in measured if own == name] for name in "ab"}
    assert by_server["a"] == by_server["b"]
    assert list(result.workloads) == ["random @ a", "random @ b"]
    (comparison,) = result.comparisons
    assert (comparison.a_name, comparison.b_name) == ("a", "b")
    assert "The text was the same for 9 of 9 prompts." in comparison.notes
    rows = {(row.name, row.statistic): row for row in comparison.rows}
    mean = [sum(line["e2e_s"] for line in log if line["server"] == name) / 9 for name in "ab"]
    row = rows["e2e", "mean"]
    assert row.ratio == pytest.approx(mean[1] / mean[0])
    assert row.interval is not None
    assert row.interval[0] <= row.ratio <= row.interval[1]
    assert ("output", "mean") in rows


def test_servers_are_compared_on_prompts_that_both_served(tmp_path: Path, server: Any, other_server: Any) -> None:
    data = texts_file(tmp_path, ["fine", "fault 1", "fine too", "fine again"])
    two = ["--base-url", server.url, "--base-url", other_server.url, "--label", "a", "--label", "b"]
    result, log = measure(tmp_path, [*two, "--model", "usage", "--model", "usage-500", *data, "--turn-size", "1"])
    (comparison,) = result.comparisons
    assert comparison.warnings == ["1 of 4 prompts failed on one server or both"]
    kept = [line["e2e_s"] for line in log if line["server"] == "a" and line["index"] != 1]
    row = next(row for row in comparison.rows if (row.name, row.statistic) == ("e2e", "mean"))
    assert row.a == pytest.approx(sum(kept) / 3)
    assert result.failures == {
        "prompts.jsonl @ a": [],
        "prompts.jsonl @ b": [FailedRequests("http 500", 1, "it broke")],
    }


def test_traces_bring_arrivals_lengths_and_shared_blocks(tmp_path: Path, server: Any) -> None:
    trace = tmp_path / "mooncake.jsonl"
    lines = [
        {"timestamp": 2000, "input_length": 600, "output_length": 4, "hash_ids": [0, 1]},
        {"timestamp": 2020, "input_length": 1100, "output_length": 2, "hash_ids": [0, 1, 2]},
        {"timestamp": 2040, "input_length": 9000, "output_length": 2, "hash_ids": [0, *range(7, 24)]},
        {"timestamp": 2060, "input_length": 512, "output_length": 3, "hash_ids": [5]},
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--dataset-name", "mooncake", "--dataset-path", str(trace), "--vocab-size", "5000"]
    result, log = measure(
        tmp_path,
        [
            "--base-url",
            server.url,
            *arguments,
            "--num-warmups",
            "0",
            "--max-total-tokens",
            "2000",
            "--trace-speed",
            "2",
        ],
    )
    prompts = [body["prompt"] for body in server.bodies[1:]]
    assert [len(prompt) for prompt in prompts] == [600, 1100, 512]
    assert prompts[0][:512] == prompts[1][:512]
    assert prompts[0][512:] == prompts[1][512:600]
    assert prompts[2] != prompts[0][:512]
    assert [body["max_tokens"] for body in server.bodies[1:]] == [4, 2, 3]
    assert [line["arrival_s"] for line in log] == pytest.approx([0.0, 0.01, 0.03])
    assert result.workloads["mooncake.jsonl"]["skipped"] == 1
    assert result.workloads["mooncake.jsonl"]["rate"] == "trace"


def test_a_text_is_cut_by_the_servers_tokenizer(tmp_path: Path, server: Any) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(32 + i % 90) for i in range(1000)))
    options = ["--dataset-name", "text", "--dataset-path", str(text), "--tokenizer", "server", "--prefix-len", "4"]
    sizes = ["--input-len", "10", "--output-len", "2", "--num-prompts", "3", "--num-warmups", "0"]
    measure(tmp_path, ["--base-url", server.url, *options, *sizes])
    ids = [body["prompt"] for body in server.bodies[1:]]
    assert [len(prompt) for prompt in ids] == [14] * 3
    assert len({tuple(prompt[:4]) for prompt in ids}) == 1
    assert all(bytes(prompt[4:]).decode() in text.read_text() for prompt in ids)
    measure(tmp_path, ["--base-url", server.url, *options, *sizes, "--endpoint", "chat"])
    sent = [body["messages"][0]["content"] for body in server.bodies[-3:]]
    assert sent == [bytes(prompt).decode() for prompt in ids]


def test_sonnets_share_their_first_lines(tmp_path: Path, server: Any) -> None:
    poem = tmp_path / "sonnet.txt"
    poem.write_text("\n".join(f"line number {i} of the poem" for i in range(10, 60)))
    options = ["--dataset-name", "sonnet", "--dataset-path", str(poem), "--tokenizer", "server"]
    sizes = ["--input-len", "500", "--prefix-len", "200", "--num-prompts", "4", "--num-warmups", "0"]
    measure(tmp_path, ["--base-url", server.url, *options, *sizes])
    prompts = [body["prompt"] for body in server.bodies[1:]]
    assert all(abs(len(prompt) - 500) <= 27 for prompt in prompts)
    lines = [prompt.splitlines() for prompt in prompts]
    assert all(line[:6] == lines[0][:6] for line in lines)
    assert len({tuple(line[7:]) for line in lines}) == 4


def test_sharegpt_asks_the_first_turn_for_as_many_tokens_as_the_answer_has(tmp_path: Path, server: Any) -> None:
    data = tmp_path / "sharegpt.json"
    talk = [{"from": "human", "value": "How?"}, {"from": "gpt", "value": "So."}, {"from": "human", "value": "Thanks"}]
    data.write_text(json.dumps([{"id": "1", "conversations": talk}, {"id": "2", "conversations": talk[:1]}]))
    options = ["--dataset-name", "sharegpt", "--dataset-path", str(data), "--num-warmups", "0"]
    measure(tmp_path, ["--base-url", server.url, *options, "--tokenizer", "server"])
    assert [(body["prompt"], body["max_tokens"]) for body in server.bodies[1:]] == [("How?", 3)]


def test_random_lengths_vary_as_far_as_asked(tmp_path: Path, server: Any) -> None:
    arguments = ["--vocab-size", "50", "--input-len", "20", "--output-len", "4", "--range-ratio", "0.5"]
    measure(tmp_path, ["--base-url", server.url, *arguments, "--num-prompts", "60", "--num-warmups", "0"])
    lengths = [len(body["prompt"]) for body in server.bodies[1:]]
    assert (min(lengths), max(lengths)) == (10, 30)
    assert {body["max_tokens"] for body in server.bodies[1:]} == {2, 3, 4, 5, 6}


lines = st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), min_size=1, max_size=8)


@given(st.lists(st.lists(lines, min_size=1, max_size=3), max_size=6), st.sampled_from(["\n", "\r\n"]), st.data())
def test_events_are_the_same_however_the_bytes_are_cut(events: list[list[str]], end: str, data: st.DataObject) -> None:
    parts = [f": comment{end}id: 3{end}" + "".join(f"data: {line}{end}" for line in event) + end for event in events]
    stream = "".join(parts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader, found = EventReader(), []
    for begin, stop in pairwise([0, *cuts, len(stream)]):
        found += reader.feed(stream[begin:stop])
    assert found == ["\n".join(event).encode() for event in events]


def test_the_client_says_how_busy_it_was(tmp_path: Path, server: Any) -> None:
    result, _ = measure(tmp_path, ["--base-url", server.url, *SMALL])
    client = result.client
    assert 0 <= client["loop_lag_p50_ms"] <= client["loop_lag_p99_ms"] <= client["loop_lag_max_ms"]
    assert client["cpu_share_of_one_core"] > 0


def test_fewer_tokens_than_asked_for_are_told(tmp_path: Path, server: Any) -> None:
    result, _ = measure(tmp_path, ["--base-url", server.url, "--model", "usage-short", *SMALL])
    assert any("9 of 9 replies have fewer tokens than were asked for" in line for line in result.warnings)


def test_the_result_is_saved_by_vllms_names(tmp_path: Path, server: Any) -> None:
    found = invoke(["--base-url", server.url, *SMALL, "--save-result", "--result-dir", str(tmp_path)])
    assert found.exit_code == 0
    (file,) = tmp_path.glob("serve-*.json")
    assert read_result(file).kind == "serve"


def test_the_table_has_what_was_asked_for(server: Any) -> None:
    found = invoke(
        ["--base-url", server.url, *SMALL, "--percentile-metrics", "ttft,e2el", "--metric-percentiles", "25"]
    )
    table = found.stdout.partition("└")[0]
    assert "p25 (95% interval)" in table
    assert "ttft" in table
    assert "e2e" in table
    assert "tpot" not in table
    assert "output" in table


def test_a_server_that_is_not_there_is_told() -> None:
    found = invoke(["--base-url", "http://127.0.0.1:1", *SMALL])
    assert isinstance(found.exception, DovetailError)
    assert "cannot be reached" in str(found.exception)
    found = invoke(["--base-url", "http://127.0.0.1:1", "--model", "m", *SMALL])
    assert "does not answer a request of one token" in str(found.exception)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dataset-name", "sharegtp"], "did you mean 'sharegpt'"),
        (["--dataset-name", "sonnet"], "needs --dataset-path"),
        (["--dataset-name", "random", "--text", "x"], "has no use for --text"),
        (["--dataset-path", "x", "--input-len", "3"], "has no use for --input-len"),
        (["--num-prompts", "0"], "--num-prompts is 0"),
        (["--range-ratio", "1"], "--range-ratio 1"),
        (["--request-rate", "0"], "--request-rate 0"),
        (["--burst-size", "2"], "finite --request-rate"),
        (["--dataset-name", "trace", "--dataset-path", "x", "--request-rate", "3"], "leave out --request-rate"),
        (["--endpoint", "/v1/embeddings"], "give completions or chat"),
        (["--goodput", "ttft:0"], "--goodput ttft:0"),
        (["--goodput", "ttfb:5"], "did you mean 'ttft'"),
        (["--percentile-metrics", "foo"], "foo"),
        (["--metric-percentiles", "101"], "between 0 and 100"),
        (["--extra-body", '{"stream": false}'], "stream is set"),
        (["--extra-body", "x"], "no JSON"),
        (["--header", "x"], "NAME=VALUE"),
        (["--result-dir", "x"], "need --save-result"),
        (["--turn-size", "3"], "needs several --base-url"),
        (["--label", "a", "--label", "b"], "2 --label for 1 --base-url"),
        (["--json", "/nope/x.json"], "no folder /nope"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_sent(arguments: list[str], words: str) -> None:
    found = invoke(["--base-url", "http://127.0.0.1:1", *arguments])
    assert isinstance(found.exception, ConfigError), found.output
    assert words in str(found.exception)


def test_a_prompt_of_a_length_needs_a_tokenizer(server: Any) -> None:
    for name in ("random", "text"):
        found = invoke(["--base-url", server.url, "--dataset-name", name])
        assert isinstance(found.exception, ConfigError)
        assert "--tokenizer" in str(found.exception)
    assert server.bodies == []
    assert "trace" in DATASETS
