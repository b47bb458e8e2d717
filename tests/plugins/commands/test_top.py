"""`dovetail top` over a real server that serves the metrics of a real engine, and over vLLM's text."""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from math import ceil, inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.text import Text
from typer.testing import CliRunner

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import ConfigError, DovetailError
from dovetail.plugins.commands.top.command import app
from dovetail.plugins.commands.top.figures import figures_between, load_of, quantile
from dovetail.plugins.commands.top.ranks import ranks_between
from dovetail.plugins.commands.top.scrape import NOTHING, metrics_url, parse
from dovetail.plugins.commands.top.screen import rank_table, table_of
from dovetail.testing.tiny_models import save_tiny_model, tiny_config
from dovetail.worker.kv_layout import stage_block_bytes

Answer = tuple[int, str, bytes]
BOUNDS = (0.1, 0.5, 1.0, 5.0)
VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:gpu_cache_usage_perc{engine="1",model_name="m"} 0.25
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 100.0
# TYPE vllm:prompt_tokens_created gauge
vllm:prompt_tokens_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 40.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 30.0
# TYPE vllm:time_per_output_token_seconds histogram
vllm:time_per_output_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 50.0
vllm:time_per_output_token_seconds_bucket{engine="0",le="0.2",model_name="m"} 100.0
vllm:time_per_output_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 100.0
vllm:time_per_output_token_seconds_count{engine="0",model_name="m"} 100.0
vllm:time_per_output_token_seconds_sum{engine="0",model_name="m"} 9.0
"""


@contextmanager
def serving(answer: Callable[[], Answer]) -> Iterator[str]:
    """An HTTP server, by its address, that answers GET /metrics."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content_type, body = answer() if self.path == "/metrics" else (404, "text/plain", b"")
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments, "--interval", "0.05"])
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    save_tiny_model(tmp_path, tiny_config("llama", max_position_embeddings=512))
    with LLM(
        model={"path": str(tmp_path), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 256},
        cache={"block_size": 4, "num_blocks": 400},
        executor={"threads": 1},
        telemetry=["prometheus"],
        speculative={"drafters": {"lookup": {"name": "ngram", "min_match": 1, "length": "fixed"}}},
    ) as llm:
        yield llm


@pytest.fixture
def busy_server(llm: LLM) -> Iterator[str]:
    """Three requests run before each reading."""

    def answer() -> Answer:
        params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        llm.generate([[5, 6, 7] * 5] * 3, params, use_tqdm=False)
        exposition = llm.engine.metrics()
        return 200, exposition.content_type, exposition.body

    with serving(answer) as address:
        yield address


def test_the_figures_of_a_real_engine(busy_server: str, llm: LLM) -> None:
    data = json.loads(run(busy_server, "--once", "--json"))
    assert data["url"] == f"http://{busy_server}/metrics"
    assert data["now"] == {"running": 0, "waiting": 0, "kv_usage": 0.0, "sinks_off": [], "engines": {}}
    [rank] = data["ranks"]
    assert (rank["rank"], rank["node"], rank["pid"], rank["state"]) == (0, "this machine", os.getpid(), "alive")
    assert rank["kv_bytes"] == 399 * stage_block_bytes(llm.engine.tokens._parts.kv.layout)[0]
    last, total = data["interval"], data["since_start"]
    assert (last["generation_tokens"], total["generation_tokens"]) == (60, 120)
    assert (last["ended"], total["ended"]) == ({"length": 3}, {"length": 6})
    assert last["generation_tokens_per_s"] == pytest.approx(60 / last["seconds"])
    assert total["seconds"] is None
    for name in ("ttft", "e2e", "queue"):
        assert (last["latencies"][name]["count"], total["latencies"][name]["count"]) == (3, 6)
        assert 0 < last["latencies"][name]["p50"] <= last["latencies"][name]["p99"]
    totals = llm.engine.speculation_totals()["lookup"]
    assert total["acceptance"]["lookup"] == {
        "rate": pytest.approx(totals.num_accepted / totals.num_drafted),
        "length": pytest.approx(1 + totals.num_accepted / totals.num_draft_rounds),
    }
    statistics = llm.engine.cache_statistics()
    assert total["prefix_hit_rate"] == statistics.prefix_hit_tokens / statistics.prefix_query_tokens


def test_the_table_of_a_real_engine(busy_server: str) -> None:
    shown = run(busy_server, "--once")
    for words in ("running", "output tokens/s", "time to first token p50 / p99", "acceptance of lookup", "120 tokens"):
        assert words in shown
    assert shown.count("since start") == 1


RANKS = """\
# TYPE dovetail:rank_info gauge
dovetail:rank_info{engine="0",rank="0",stage="0",tensor_rank="0",node="node a",device="cuda:0",pid="12"} 1
dovetail:rank_info{engine="1",rank="0",stage="0",tensor_rank="0",node="node b",device="cuda:0",pid="13"} 1
dovetail:rank_info{engine="1",rank="1",stage="1",tensor_rank="0",node="node b",device="cuda:1",pid=""} 1
# TYPE dovetail:rank_up gauge
dovetail:rank_up{engine="0",rank="0",stage="0"} 1
dovetail:rank_up{engine="1",rank="0",stage="0"} 0
dovetail:rank_up{engine="1",rank="1",stage="1"} 1
# TYPE dovetail:rank_silent_seconds gauge
dovetail:rank_silent_seconds{engine="0",rank="0",stage="0"} 0.4
dovetail:rank_silent_seconds{engine="1",rank="1",stage="1"} 9
# TYPE dovetail:rank_running_step_seconds gauge
dovetail:rank_running_step_seconds{engine="0",rank="0",stage="0"} 7.2
# TYPE dovetail:rank_device_memory_bytes gauge
dovetail:rank_device_memory_bytes{engine="0",rank="0",stage="0"} 3221225472
"""


def test_workers_of_replicas_that_hang_ended_or_fell_silent() -> None:
    ranks = ranks_between(NOTHING, parse(RANKS))
    assert [(row.engine, row.rank, row.node, row.pid, row.state) for row in ranks] == [
        ("0", 0, "node a", 12, "in a step for 7 s"),
        ("1", 0, "node b", 13, "ended"),
        ("1", 1, "node b", None, "silent for 9 s"),
    ]
    down = ranks_between(
        NOTHING, parse(f'{RANKS}\n# TYPE dovetail:replica_up gauge\ndovetail:replica_up{{engine="1"}} 0\n')
    )
    assert [row.state for row in down] == ["in a step for 7 s", "ended", "replica down"]
    table = rank_table(ranks, of_replicas=True)
    titles = ["replica", "rank", "stage", "tensor rank", "node", "pid", "device", "state", "GPU memory"]
    assert [column.header for column in table.columns] == titles
    assert list(table.columns[-1].cells) == [Text("3.00 GiB"), Text(""), Text("")]


def test_a_replica_that_is_down_is_shown_with_the_reason() -> None:
    text = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="1"} 3
# TYPE dovetail:replica_up gauge
dovetail:replica_up{engine="0"} 0
dovetail:replica_up{engine="1"} 1
# TYPE dovetail:replica_down_reason gauge
dovetail:replica_down_reason{engine="0",reason="it does not answer"} 1
"""
    now = parse(text)
    load, figures = load_of(now), figures_between(NOTHING, now)
    assert [(engine, has.running, has.trouble) for engine, has in load.engines.items()] == [
        ("0", 0, "it does not answer"),
        ("1", 3, ""),
    ]
    cells = [str(cell) for column in table_of("url", load, figures, figures).columns for cell in column.cells]
    assert {"replica 0", "down (it does not answer)", "replica 1", "3 running, 0 waiting"} <= set(cells)


def test_vllm_s_names_old_and_new() -> None:
    now = parse(VLLM)
    load = load_of(now)
    assert (load.running, load.waiting, load.kv_usage) == (5, 4, 0.375)
    figures = figures_between(NOTHING, now)
    assert figures.prompt_tokens == 100
    assert (figures.acceptance[""].rate, figures.acceptance[""].length) == (0.75, 4.0)
    assert figures.latencies["itl"].p50 == pytest.approx(0.1)
    assert figures.latencies["itl"].p99 == pytest.approx(0.198)
    assert figures.latencies.keys() == {"itl"}


def test_only_what_is_new_counts() -> None:
    before, after = parse(VLLM), parse(VLLM.replace('"} 100.0', '"} 130.0').replace('"} 50.0', '"} 60.0'))
    figures = figures_between(before, after)
    assert figures.prompt_tokens == 30
    assert figures.latencies["itl"].count == 30
    assert figures.latencies["itl"].p50 == pytest.approx(0.1 + 0.1 * (15 - 10) / 20)
    assert figures.acceptance == {}


def test_a_server_that_was_started_anew_begins_at_zero() -> None:
    before = parse(VLLM)
    after = parse(VLLM.replace('"} 100.0', '"} 7.0'))
    assert figures_between(before, after).prompt_tokens == 7


def test_series_that_come_and_go_are_no_traffic_of_others() -> None:
    text = '# TYPE vllm:num_preemptions_total counter\nvllm:num_preemptions_total{{v="{}"}} {}\n'
    before, after = parse(text.format(1, 90)), parse(text.format(2, 4))
    assert figures_between(before, after).preemptions == 4


@example([0.0] * 3, 1.0)  # 3 * 0.1 / 3 is more than 0.1
@given(st.lists(st.floats(0, 20), min_size=1), st.floats(0.01, 1.0))
def test_a_quantile_lies_in_the_bucket_of_the_exact_one(values: list[float], share: float) -> None:
    bounds = [*BOUNDS, inf]
    cumulative = [(bound, float(sum(value <= bound for value in values))) for bound in bounds]
    exact = sorted(values)[max(0, ceil(share * len(values)) - 1)]
    bucket = bisect_left(BOUNDS, exact)
    lower = 0.0 if bucket == 0 else BOUNDS[bucket - 1]
    upper = BOUNDS[bucket] if bucket < len(BOUNDS) else BOUNDS[-1]
    assert lower <= quantile(share, cumulative) <= upper


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost:8000", "http://localhost:8000/metrics"),
        ("https://host/base/", "https://host/base/metrics"),
        ("http://host:1/metrics", "http://host:1/metrics"),
    ],
)
def test_an_address_may_be_short(text: str, url: str) -> None:
    assert metrics_url(text) == url


def test_a_password_in_the_address_is_sent_and_not_shown(busy_server: str) -> None:
    url = f"http://me:secret@{busy_server}"
    assert json.loads(run(url, "--once", "--json"))["url"] == f"http://me:***@{busy_server}/metrics"
    assert "secret" not in run(url, "--once")
    for wrong in (f"{url}/elsewhere", "me:secret@127.0.0.1:1", "ftp://me:secret@host"):
        with pytest.raises(DovetailError, match=r"me:\*\*\*@") as caught:
            run(wrong, "--once")
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "ftp://host", "http://", "host:x", "host:99999"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no address of a server: write http://host:port"):
        metrics_url(text)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, "text/plain", b""), "answered 404 Not Found"),
        ((200, "text/html", b"<html><body>hello"), "serves no metrics in Prometheus' text format"),
        ((200, "text/plain", b"up 1\n"), "none of an engine: vllm:num_requests_running is not among them"),
    ],
)
def test_a_server_without_such_metrics(answer: Answer, words: str) -> None:
    with serving(lambda: answer) as address, pytest.raises(DovetailError, match=words):
        run(address, "--once")


def test_nobody_there() -> None:
    with serving(lambda: (200, "", b"")) as address:
        pass
    with pytest.raises(DovetailError, match=r"no answer from http://.*/metrics \(.*\): is the server running"):
        run(address)


def test_a_sink_that_was_switched_off_is_shown() -> None:
    text = VLLM + '# TYPE dovetail:telemetry_sink_on gauge\ndovetail:telemetry_sink_on{sink="jsonl"} 0.0\n'
    with serving(lambda: (200, "text/plain", text.encode())) as address:
        assert "telemetry sink jsonl" in run(address, "--once")
        assert json.loads(run(address, "--once", "--json"))["now"]["sinks_off"] == ["jsonl"]


def test_replicas_are_shown_by_themselves() -> None:
    text = "".join(
        f'vllm:num_requests_running{{engine="{engine}"}} {running}\n'
        f'vllm:num_requests_waiting{{engine="{engine}"}} 2\nvllm:kv_cache_usage_perc{{engine="{engine}"}} 0.25\n'
        for engine, running in ((10, 5), (9, 3))
    )
    with serving(lambda: (200, "text/plain", text.encode())) as address:
        shown = run(address, "--once")
        assert shown.index("3 running, 2 waiting, 25.0% of KV cache") < shown.index("5 running, 2 waiting")
        now = json.loads(run(address, "--once", "--json"))["now"]
        assert now["engines"]["9"] == {"running": 3, "waiting": 2, "kv_usage": 0.25, "trouble": ""}
        assert now["running"] == 8


def test_without_a_terminal_it_prints_again_and_again() -> None:
    """Until the server is gone, here."""
    answers: list[Any] = [(200, "text/plain", VLLM.encode())] * 3 + [(500, "text/plain", b"")]
    with serving(lambda: answers.pop(0)) as address:
        result = CliRunner().invoke(app, [address, "--interval", "0.05", "--json"])
    assert [json.loads(line)["now"]["running"] for line in result.stdout.splitlines()] == [5, 5]
    assert "answered 500" in str(result.exception)
