"""The engine over spawned tensor-parallel workers: same tokens, and a clean end when a worker dies."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from dovetail import LLM, AsyncLLMEngine, LLMEngine, SamplingParams
from dovetail.contracts.errors import ModelError, RequestError, WorkerError
from dovetail.contracts.outputs import RequestOutput
from dovetail.contracts.telemetry import StepStats, TelemetrySink
from dovetail.executors.processes import ProcessExecutor
from dovetail.executors.processes._operations import Timeouts
from dovetail.executors.processes._supervisor import WorkerSupervisor
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

PROMPTS = [[5, 9, 33, 70, 12], [100, 4], list(range(3, 60))]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=16, ignore_eos=True)


@pytest.fixture(
    scope="module",
    params=["llama", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gemma2", "qwen3_moe"))],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp(request.param)
    return directory, save_tiny_model(directory, tiny_config(request.param))


def sections(directory: Path, tensor_parallel: int, **more: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(directory), "tokenizer_mode": "none", "dtype": "float32"},
        "cache": {"block_size": 8, "num_blocks": 150},
        "executor": {"tensor_parallel": tensor_parallel, "threads": 1},
    } | more


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_two_ranks_give_the_tokens_of_one(model: tuple[Path, Any]) -> None:
    import torch

    directory, hf = model
    before = children()
    with LLM(**sections(directory, 2)) as llm:
        assert llm.engine.config.executor.name == "multiproc"
        greedy = llm.generate(PROMPTS, GREEDY)
        seeded = llm.generate(PROMPTS, SEEDED)
    assert children() <= before
    with LLM(**sections(directory, 1)) as llm:
        assert llm.engine.config.executor.name == "cpu"
        alone = llm.generate(PROMPTS, SEEDED)
    assert [o.outputs[0].token_ids for o in seeded] == [o.outputs[0].token_ids for o in alone]
    for prompt, output in zip(PROMPTS, greedy, strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = hf.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False, pad_token_id=0)
        assert output.outputs[0].token_ids == out[0, len(prompt) :].tolist()
        assert output.outputs[0].logprobs is not None
        assert len(output.outputs[0].logprobs) == 16


def test_two_ranks_find_on_disk_what_two_others_saved(llama: Path, tmp_path: Path) -> None:
    """After a restart, each rank reads its part of every block."""
    connector = {"name": "disk", "path": str(tmp_path)}
    found = []
    for _ in range(2):
        with LLM(**sections(llama, 2, kv_connector=connector)) as llm:
            output = llm.generate(PROMPTS[2:], GREEDY)[0]
            found.append((output.num_cached_tokens, output.outputs[0].token_ids))
    assert [num_cached for num_cached, _ in found] == [0, 56]
    assert found[0][1] == found[1][1]


def test_regions_of_two_ranks_sleep_and_wake_up_together(tmp_path: Path) -> None:
    """At both levels, in parts; where a checkpoint is another one, all ranks sleep on."""
    save_tiny_model(tmp_path, tiny_config("llama"), seed=1)
    with LLM(**sections(tmp_path, 2)) as llm:
        before = tokens_of(llm)
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up(["weights"])
            llm.wake_up(["kv_cache"])
            assert tokens_of(llm) == before
        llm.sleep(2)
        save_tiny_model(tmp_path, tiny_config("llama"), seed=2)
        for _ in range(2):
            with pytest.raises(ModelError, match="changed meanwhile"):
                llm.wake_up(["weights"])
        llm.wake_up(new_weights=True)
        assert tokens_of(llm) != before


def tokens_of(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return llm.generate([[5, 6, 7, 8, 9]], params, use_tqdm=False)[0].outputs[0].token_ids


CAPTURABLE = Path(__file__).with_name("capturable.py")


@pytest.mark.parametrize("model_type", ["llama", pytest.param("gemma2", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("drafts", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_two_ranks_capture_their_steps_with_the_collectives_in_them(
    tmp_path: Path, model_type: str, drafts: bool
) -> None:
    """On the null device, whose graphs repeat gloo's collectives in place of NCCL's; a decode step that is no graph's
    fails here."""
    save_tiny_model(tmp_path, tiny_config(model_type))
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    sections_of_both: dict[str, Any] = {"scheduler": {"max_num_seqs": 4}}
    if drafts:
        sections_of_both["speculative"] = {"drafters": {"ngram": {"name": "ngram"}}}
    captured = sections(tmp_path, 2, attention=f"{CAPTURABLE}:GraphsOnly", **sections_of_both)
    captured["executor"] |= {"name": "multiproc", "device": "null", "cuda_graphs": [2, 4]}
    captured["model"]["operators"] = None
    with LLM(**captured) as llm:
        found = llm.generate(PROMPTS, params)
    with LLM(**sections(tmp_path, 1, **sections_of_both)) as llm:
        alone = llm.generate(PROMPTS, params)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in alone]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_tiny_model(directory, tiny_config("llama", max_position_embeddings=4096))
    return directory


@pytest.mark.parametrize(
    "drafter",
    [
        {"name": "ngram", "num_tokens": 3, "min_match": 1, "length": "fixed"},
        pytest.param({"name": "ngram", "num_tokens": 3, "min_match": 1}, marks=pytest.mark.nightly),
        pytest.param({"name": "recycling", "num_tokens": 8, "length": "fixed"}, marks=pytest.mark.nightly),
    ],
    ids=["ngram", "ngram-adaptive", "recycling"],
)
def test_speculation_over_two_ranks(llama: Path, drafter: dict[str, Any]) -> None:
    """Drafters of tokens alone, and of what the target finds likely after every row."""
    speculative = {"drafters": {"it": drafter}, "default": "it"}
    prompt = [7, 8, 9, 7, 8, 9, 7, 8]
    with LLM(**sections(llama, 2, speculative=speculative, cache={"num_blocks": 600})) as llm:
        output = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))[0]
    with LLM(**sections(llama, 1, cache={"num_blocks": 600})) as llm:
        plain = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))[0]
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    if "length" in drafter:  # what adapts may choose to draft nothing
        assert output.metrics.num_drafted > 0


DRAFTERS = '''
"""Drafters for a small model of two ranks."""

from dovetail.contracts.speculation import Draft, DraftCapabilities, DraftWorker


class Tree(DraftWorker):
    """All tokens from a multiple of 40 on as siblings, which the target chooses now and then."""

    contract = (1, 0)
    capabilities = DraftCapabilities(trees=True, tensor_parallel=None)

    def propose(self, batch):
        drafts = []
        for request in batch.requests:
            first = len(request.token_ids) % 3 * 40
            tokens = list(range(first, first + request.max_drafts))
            drafts.append(Draft(tokens, [-1] * len(tokens)))
        return drafts


class Heads(DraftWorker):
    """Declares any number of ranks, and asks for the unembedding, in which every rank would have to take part."""

    contract = (1, 0)
    capabilities = DraftCapabilities(needs_hidden_states=True, tensor_parallel=None)

    def propose(self, batch):
        rows = [request.hidden_rows[-1] for request in batch.requests]
        best = self.setup.compute_logits(batch.hidden_states[rows]).argmax(-1).tolist()
        return [Draft([token][: request.max_drafts]) for token, request in zip(best, batch.requests)]
'''


def speculative(directory: Path, drafter: str, num_tokens: int) -> dict[str, Any]:
    (directory / "drafters.py").write_text(DRAFTERS)
    chosen = {"name": f"{directory}/drafters.py:{drafter}", "num_tokens": num_tokens, "length": "fixed"}
    return {"drafters": {"it": chosen}, "default": "it"}


def test_trees_and_preemptions_over_two_ranks(llama: Path) -> None:
    prompts = [[i + 3, *range(7, 20 + i)] for i in range(4)]
    more: dict[str, Any] = {"cache": {"block_size": 8, "num_blocks": 14, "prefix_caching": False}}
    more["speculative"] = speculative(llama, "Tree", 30)
    config = sections(llama, 2, **more)
    config["model"]["max_model_len"] = 64
    params = [replace(GREEDY, logprobs=None), *[SEEDED] * 3]
    with LLM(**config) as llm:
        outputs = llm.generate(prompts, params)
    with LLM(**sections(llama, 1)) as llm:
        plain = llm.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    assert sum(o.metrics.num_preemptions for o in outputs) > 0
    assert sum(o.metrics.num_accepted for o in outputs) > 0


def test_a_failing_request_and_a_failing_drafter_leave_two_ranks_in_step(llama: Path) -> None:
    nothing = SamplingParams(temperature=0, allowed_token_ids=[5], stop_token_ids=[5], min_tokens=2)
    params = [SEEDED, nothing, SEEDED]
    with LLM(**sections(llama, 2, speculative=speculative(llama, "Heads", 2))) as llm:
        ids = [llm.engine.add_request(str(i), *asked) for i, asked in enumerate(zip(PROMPTS, params, strict=True))]
        assert ids
        outputs = {}
        while llm.engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in llm.engine.step() if output.finished}
    with LLM(**sections(llama, 1)) as llm:
        plain = llm.generate(PROMPTS, SEEDED)
    assert "no token is left" in str(outputs["1"].error)
    for i in (0, 2):
        assert outputs[str(i)].outputs[0].token_ids == plain[i].outputs[0].token_ids
        assert "drafters run on one" in (outputs[str(i)].metrics.drafter_error or "")


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_killed_worker_fails_the_requests_and_the_engine_can_be_made_anew(
    llama: Path, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = sections(llama, 2, cache={"num_blocks": 600})
    engine = LLMEngine.from_config(**config)
    engine.add_request("doomed", [1, 2, 3], SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True))
    for _ in range(3):
        engine.step()
    os.kill(worker_pids(before)[rank], signal.SIGKILL)
    with pytest.raises(WorkerError, match=rf"rank {rank} .*was killed by SIGKILL"):
        run_to_the_end(engine)
    with pytest.raises(WorkerError, match=f"rank {rank}"):
        engine.step()
    assert not engine.request_ids
    engine.shutdown()
    assert children() <= before
    assert not list(tmp_path.iterdir())
    with LLM(**config) as llm:
        assert (
            len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2
        )


class HoldsBegun(TelemetrySink):
    """Holds the requests of an engine after the step of the first token."""

    contract = (1, 0)

    def __init__(self, engine: LLMEngine):
        self._engine = engine

    def on_step(self, stats: StepStats) -> None:
        if stats.first_tokens:
            self._engine.hold(self._engine.request_ids)


def stopped_in_mid_run(
    engine: AsyncLLMEngine, before: set[int], step_timeout_s: float | None
) -> AsyncIterator[RequestOutput]:
    """A stream that has begun, whose only worker is stopped. Steps have the deadline from then on: those before may
    take longer on a busy machine."""
    engine._engine.add_telemetry_sink(HoldsBegun(engine._engine))

    async def outputs() -> AsyncIterator[RequestOutput]:
        params = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
        stream = engine.generate([1, 2, 3], params, "begun")
        yield await anext(stream)
        worker = psutil.Process(worker_pids(before)[0])
        worker.suspend()
        while worker.status() != psutil.STATUS_STOPPED:
            await asyncio.sleep(0)
        supervisor_of(engine)._timeouts = Timeouts(60.0, step_timeout_s)
        await engine.resume("begun")
        async for output in stream:
            yield output

    return outputs()


def supervisor_of(engine: AsyncLLMEngine) -> WorkerSupervisor:
    executor = engine._engine.tokens._parts.executor
    assert isinstance(executor, ProcessExecutor)
    assert executor._supervisor is not None
    return executor._supervisor


def one_process(llama: Path, **executor: Any) -> dict[str, Any]:
    return sections(llama, 1, cache={"num_blocks": 600}, executor={"name": "multiproc", "threads": 1, **executor})


def test_a_stopped_worker_ends_streams_and_questions_at_the_deadline(llama: Path) -> None:
    before = children()
    engine = AsyncLLMEngine.from_config(**one_process(llama))

    async def main() -> None:
        with pytest.raises(WorkerError, match=r"worker rank 0 .* is stopped .*step_timeout_s"):
            await last(stopped_in_mid_run(engine, before, step_timeout_s=1.0))
        assert not engine.is_running
        with pytest.raises(WorkerError, match="rank 0"):
            await engine.cache_statistics()
        with pytest.raises(WorkerError, match="rank 0"):
            await engine.abort("any")

    asyncio.run(main())
    engine.shutdown()
    assert children() <= before


def test_shutdown_ends_though_a_worker_is_stopped_and_steps_have_no_deadline(llama: Path) -> None:
    before = children()
    engine = AsyncLLMEngine.from_config(**one_process(llama, step_timeout_s=None))

    async def main() -> None:
        stream = stopped_in_mid_run(engine, before, step_timeout_s=None)
        await anext(stream)
        reading = asyncio.create_task(last(stream))
        while supervisor_of(engine)._under_way() is None:  # a step, which the stopped worker will not do
            await asyncio.sleep(0)
        question = asyncio.create_task(engine.cache_statistics())
        await asyncio.sleep(0)
        await asyncio.to_thread(engine.shutdown, 0.2)
        with pytest.raises(RequestError, match="the engine is shut down"):
            await reading
        await asyncio.gather(question, return_exceptions=True)

    asyncio.run(main())
    assert children() <= before


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in stream][-1]


def test_an_async_engine_that_is_dropped_ends_its_workers(llama: Path) -> None:
    before = children()
    engine = AsyncLLMEngine.from_config(**one_process(llama))
    workers = [psutil.Process(pid) for pid in worker_pids(before)]
    assert len(workers) == 1
    del engine
    gc.collect()
    assert psutil.wait_procs(workers, timeout=30)[1] == []


def run_to_the_end(engine: LLMEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step()


def worker_pids(before: set[int]) -> list[int]:
    """Processes of the workers in rank order, which is the order in which they were started."""
    new = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    return [child.pid for child in sorted(new, key=lambda child: (child.create_time(), child.pid))]
