"""`dovetail simulate-routing` over small traces whose outcome can be computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dovetail.plugins.commands.simulate_routing.cache import BlockCache
from dovetail.plugins.commands.simulate_routing.command import SimulateRoutingCommand
from dovetail.testing.command_suite import CommandSuite

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50.99,396,109\n"


def mooncake(*lines: tuple[int, int, list[int]], output: int = 1) -> str:
    rows = [
        {"timestamp": at, "input_length": length, "output_length": output, "hash_ids": ids} for at, length, ids in lines
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


class TestSimulateRouting(CommandSuite):
    plugin = SimulateRoutingCommand
    works = (
        ["t.jsonl", "--replicas", "2"],
        ["t.csv", "--router", "least_tokens", "--json"],
        ["t.jsonl", "--router", '{"name": "prefix_aware", "request_cost": 0}', "--html", "p.html"],
    )
    refused = (
        ["none.jsonl"],
        ["other.csv"],
        ["t.jsonl", "--replicas", "0"],
        ["t.jsonl", "--router", "fastest"],
        ["t.jsonl", "--router", '{"name": "prefix_aware", "cost": 0}'],
        ["t.jsonl", "--router", "{"],
        ["t.jsonl", "--router", "round_robin", "--router", "round_robin"],
        ["t.jsonl", "--speed", "0"],
        ["t.jsonl", "--prefill-rate", "nan"],
        ["t.jsonl", "--kv-blocks", "2"],
        ["t.jsonl", "--html", "none/p.html"],
    )

    @pytest.fixture(autouse=True)
    @classmethod
    def _traces(cls, _elsewhere: None) -> None:
        Path("t.jsonl").write_text(mooncake((0, 2000, [1, 2, 3, 4]), (9000, 2000, [1, 2, 3, 5])))
        Path("t.csv").write_text(AZURE)
        Path("other.csv").write_text("when,what\n1,2\n")

    def results(self, text: str, *options: str) -> list[dict[str, float]]:
        """By router, of a trace in JSON lines."""
        Path("own.jsonl").write_text(text)
        result = self.run(["own.jsonl", "--json", "--prefill-rate", "1000", "--decode-step-ms", "100", *options])
        assert result.exit_code == 0, result.output
        return json.loads(result.output)["routers"]

    def test_a_prefix_is_found_where_it_was_computed(self) -> None:
        text = mooncake((0, 2000, [1, 2, 3, 4]), (9000, 2000, [1, 2, 3, 5]))
        blind, aware = self.results(text, "--replicas", "2", "--router", "round_robin", "--router", "prefix_aware")
        assert (blind["hit_rate"], blind["ttft_p50"], blind["ttft_p99"]) == (0, 2, 2)
        assert aware["hit_rate"] == 3 * 512 / 4000
        assert aware["ttft_p50"] == pytest.approx(2 - 3 * 0.512)

    @pytest.mark.parametrize(
        ("answer", "words"),
        [
            ("np.int64(1)", None),
            ("'one'", "choose returned 'one', which is no integer"),
            ("np.float64(1)", "which is no integer"),
            ("7", "it chose replica 7, and there are 2, numbered from 0"),
            ("-1", "it chose replica -1, and there are 2"),
            ("replicas[5].index", "raised IndexError: list index out of range"),
        ],
    )
    def test_what_a_router_answers_is_judged_as_in_a_server(self, answer: str, words: str | None) -> None:
        """A server asks by the same function."""
        Path("own.py").write_text(
            "import numpy as np\nfrom dovetail.contracts.router import Router\n\n\nclass Own(Router):\n"
            f"    contract = (1, 0)\n\n    def choose(self, request, replicas):\n        return {answer}\n"
        )
        arguments = ["t.jsonl", "--replicas", "2", "--router", "./own.py:Own", "--json"]
        if words is None:
            assert self.run(arguments).exit_code == 0
        else:
            assert words in str(self.run(arguments).exception)

    def test_requests_wait_for_their_turn(self) -> None:
        """Two prompts on one replica: the second one's first token comes after both were computed, and the first one's
        output is generated in the same steps."""
        text = mooncake((0, 500, [1]), (100, 500, [2]), output=3)
        (only,) = self.results(text, "--replicas", "1", "--router", "round_robin")
        assert only["ttft_p50"] == pytest.approx(0.5)
        assert only["ttft_p99"] == pytest.approx(0.5 + 0.5 + 0.1 - 0.1)
        assert only["seconds"] == pytest.approx(0.5 + 0.6 + 2 * 0.1)

    def test_an_arrival_cuts_steps_that_only_generate(self) -> None:
        text = mooncake((0, 500, [1]), (1050, 500, [2]), output=100)
        (only,) = self.results(text, "--replicas", "1", "--router", "round_robin")
        # The step that runs at 1.05 ends at 1.1; then the prompt is computed while the other generates a token.
        assert only["ttft_p99"] == pytest.approx(0.05 + 0.5 + 0.1)

    def test_the_page_has_every_router(self) -> None:
        assert self.run(["t.jsonl", "--html", "p.html"]).exit_code == 0
        page = Path("p.html").read_text()
        assert all(name in page for name in ("round_robin", "least_tokens", "prefix_aware", "Hit rate", "TTFT"))

    def test_says_where_a_trace_has_no_prefixes(self) -> None:
        assert "hash_ids" in json.loads(self.run(["t.csv", "--json"]).output)["warnings"][0]


def test_the_cache_evicts_tails_of_what_was_freed_first():
    cache = BlockCache(4)
    assert cache.take([], 2)
    assert cache.register([b"a", b"b"]) == [b"a", b"b"]
    cache.free([b"a", b"b"], 0)
    assert cache.take([b"a"], 2)
    assert cache.evicted() == ()
    assert not cache.take([], 2)
    assert cache.take([], 1)
    assert cache.evicted() == (b"b",)
    assert cache.run([b"a", b"b"], 2) == 1
