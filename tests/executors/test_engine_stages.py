"""The engine over pipeline stages: the tokens of one process, whatever else is asked."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from dovetail import LLM, SamplingParams
from dovetail.commands import RankEstimate, explain, load_config
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.outputs import RequestOutput
from dovetail.plugins.commands.top.ranks import RankRow, ranks_between
from dovetail.plugins.commands.top.scrape import Snapshot, parse
from dovetail.plugins.commands.top.screen import rank_table
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

PROMPTS = [[5, 9, 33, 70, 12], [100, 4], list(range(3, 60)), [7, 8, 9, 7, 8, 9, 7, 8], [61] * 20, [2, 4, 8, 16, 32, 64]]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=24, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)
COUNTING = f"{Path(__file__).with_name('counting.py')}:CountingExecutor"
KINDS = {"plan", "receive", "all_reduce", "all_gather", "broadcast", "send", "result"}
SHORT_OF_BLOCKS = {"block_size": 4, "num_blocks": 36}


def sections(directory: Path, stages: int = 1, tensor_parallel: int = 1, **more: Any) -> dict[str, Any]:
    executor = {"pipeline_parallel": stages, "tensor_parallel": tensor_parallel, "threads": 1}
    return {
        "model": {"path": str(directory), "tokenizer_mode": "none", "dtype": "float32"},
        "cache": {"block_size": 8, "num_blocks": 150},
        "executor": executor | more.pop("executor", {}),
        "scheduler": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
    } | more


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_tiny_model(directory, tiny_config("llama", num_hidden_layers=4, max_position_embeddings=512))
    return directory


@pytest.fixture(scope="module")
def alone(llama: Path) -> Iterator[LLM]:
    """One process, with as much memory as it likes."""
    with LLM(**sections(llama)) as llm:
        yield llm


def test_two_stages_give_the_tokens_of_one_process(llama: Path, alone: LLM) -> None:
    """Greedy, seeded and scored, in chunks, while requests are preempted and swapped."""
    cache = SHORT_OF_BLOCKS | {"swap_gib": 0.0001}
    executor = {"stage_layers": [3, 1]}
    with LLM(**sections(llama, 2, cache=cache, executor=executor, telemetry=["prometheus"])) as llm:
        before = parse(llm.engine.metrics().body.decode())
        assert llm.engine.config.executor.name == "multiproc"
        for params in (GREEDY, SEEDED):
            assert tokens(llm.generate(PROMPTS, params)) == tokens(alone.generate(PROMPTS, params))
        found, expected = llm.generate(PROMPTS[:3], SCORED), alone.generate(PROMPTS[:3], SCORED)
        assert tokens(found) == tokens(expected)
        assert [output.outputs[0].logprobs for output in found] == [output.outputs[0].logprobs for output in expected]
        assert [output.prompt_logprobs for output in found] == [output.prompt_logprobs for output in expected]
        counts = llm.engine.tokens._parts.kv.statistics()
        check_top(llm, before)
    assert counts.num_swapped_out_blocks > 0
    assert counts.num_swapped_in_blocks > 0


def check_top(llm: LLM, before: Snapshot) -> None:
    """`dovetail top` shows both ranks: processes that answer and computed all steps, with the KV pages of their
    layers."""
    ranks = ranks_of_one_step(llm, before)
    assert [(row.rank, row.stage, row.tensor_rank, row.node, row.device, row.state) for row in ranks] == [
        (0, 0, 0, "this machine", "cpu", "alive"),
        (1, 1, 0, "this machine", "cpu", "alive"),
    ]
    assert {psutil.Process(row.pid).ppid() for row in ranks} == {os.getpid()}
    assert ranks[0].kv_bytes == 3 * (ranks[1].kv_bytes or 0) > 0
    assert all(
        (row.memory_bytes or 0) > 2**20 and (row.last_step_s or 0) > 0 and 0 < (row.busy or 0) <= 1 for row in ranks
    )
    console = Console(width=200)
    with console.capture() as shown:
        console.print(rank_table(ranks, of_replicas=False))
    assert all(f"{row.pid}" in shown.get() for row in ranks)


def ranks_of_one_step(llm: LLM, before: Snapshot) -> list[RankRow]:
    """Once both workers have reported as many steps; each reports once per second."""
    deadline = time.monotonic() + 60
    while True:
        ranks = ranks_between(before, parse(llm.engine.metrics().body.decode()))
        (fewest, *others) = sorted({row.num_steps or 0 for row in ranks})
        if fewest > 10 and not others and all(row.state == "alive" for row in ranks):
            return ranks
        assert time.monotonic() < deadline, ranks
        time.sleep(0.02)


@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        pytest.param("gemma3_text", marks=pytest.mark.nightly),
        pytest.param("mixtral", marks=pytest.mark.nightly),
        pytest.param("deepseek_v3", marks=pytest.mark.nightly),
    ],
)
def test_stages_of_two_ranks_each(tmp_path: Path, model_type: str) -> None:
    """Pipeline and tensor parallel together, over sliding windows, experts and latent pages. Each worker finds its part
    of what was computed on disk."""
    save_tiny_model(tmp_path / "model", tiny_config(model_type))
    with LLM(**sections(tmp_path / "model")) as llm:
        expected = [tokens(llm.generate(PROMPTS, params)) for params in (GREEDY, SEEDED)]
    connector = {"name": "disk", "path": str(tmp_path / "blocks")}
    config = sections(tmp_path / "model", 2, 2, kv_connector=connector, executor={"name": COUNTING})
    with LLM(**config) as llm:
        assert [tokens(llm.generate(PROMPTS, params)) for params in (GREEDY, SEEDED)] == expected
        llm.engine.tokens.exchange.settle()
        llm.reset_prefix_cache()
        again = llm.generate(PROMPTS[2:3], GREEDY)
        check_messages(llm, explain(load_config(config)).ranks)
    assert (again[0].num_cached_tokens, tokens(again)) == (56, expected[0][2:3])


def check_messages(llm: LLM, ranks: tuple[RankEstimate, ...]) -> None:
    """Every rank has the messages that explain counts: of a prompt's step and four decode steps."""
    executor = llm.engine.tokens._parts.executor
    executor.call("messages")
    prompt = [90, 80, 70, 60, 50, 40, 30]
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    num_steps, num_tokens = 5, len(prompt) + 4
    expected = [
        {one.kind: (one.count * num_steps, one.num_bytes(num_tokens, num_steps) or 0) for one in rank.messages}
        for rank in ranks
    ]
    assert executor.call("messages") == expected
    assert {kind for rank in expected for kind in rank} == KINDS


def test_speculation_over_stages(llama: Path, alone: LLM, tmp_path: Path) -> None:
    """The last stage drafts, with tables and with a model of its own; the first learns the drafts with the plan."""
    save_tiny_model(tmp_path, tiny_config("llama", num_hidden_layers=1), seed=3)
    drafters = {
        "lookup": {"name": "ngram", "num_tokens": 3, "min_match": 1, "length": "fixed"},
        "model": {"name": "draft_model", "path": str(tmp_path), "num_tokens": 2, "length": "fixed"},
    }
    speculative = {"drafters": drafters, "default": "lookup"}
    with LLM(**sections(llama, 2, speculative=speculative, cache=SHORT_OF_BLOCKS)) as llm:
        for drafter in drafters:
            for params in (GREEDY, SEEDED):
                asked = SamplingParams(**{**vars_of(params), "speculation": drafter})
                outputs = llm.generate(PROMPTS, asked)
                if params is GREEDY:
                    assert tokens(outputs) == tokens(alone.generate(PROMPTS, params))
                assert sum(output.metrics.num_drafted for output in outputs) > 0


def vars_of(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in ("temperature", "top_p", "seed", "max_tokens", "ignore_eos")}


@pytest.mark.parametrize(
    ("executor", "why"),
    [
        ({"pipeline_parallel": 5}, r"the model has 4 layers, and each stage needs one at least; set it to 4 or less"),
        ({"pipeline_parallel": 2, "stage_layers": [4]}, r"it names 1 stages, and executor.pipeline_parallel is 2"),
        (
            {"pipeline_parallel": 2, "stage_layers": [1, 2]},
            r"these are 3 layers, and the model has 4; give 2 counts that sum up to 4",
        ),
        ({"pipeline_parallel": 2, "stage_layers": [4, 0]}, r"each stage needs one layer at least"),
        ({"stage_layers": [2, 2]}, r"executor.pipeline_parallel is 1: one stage has all 4 layers"),
        ({"pipeline_parallel": 2, "name": "cpu"}, r"runs pipeline_parallel up to 1, not 2"),
    ],
)
def test_stages_that_cannot_be(llama: Path, executor: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        LLM(**sections(llama, executor=executor))
