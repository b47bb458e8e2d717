"""`AsyncLLMEngine`: many streams, cancellation, errors, several event loops."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, AsyncLLMEngine, SamplingParams
from dovetail.contracts.errors import PluginError, RequestError, WorkerError
from dovetail.contracts.outputs import RequestOutput

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
BEGUN = replace(LONG, extra={"held": "begun"})
"""Held after its first token by HOLDING of tests/conftest.py: the step thread waits for no event loop, so that another
may be done before a test goes on."""

MakeAsync = Callable[..., AsyncLLMEngine]


@pytest.fixture
def make_async(
    make_llm: Callable[..., LLM], holding_site: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeAsync]:
    created: list[AsyncLLMEngine] = []
    monkeypatch.syspath_prepend(str(holding_site))

    def make(**sections: Any) -> AsyncLLMEngine:
        created.append(AsyncLLMEngine(make_llm(telemetry=["holding"], **sections).engine))
        return created[-1]

    yield make
    for engine in created:
        engine.shutdown()


async def last_output(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in stream][-1]


async def used_blocks(engine: AsyncLLMEngine) -> int:
    """After everything that was asked of the engine before."""
    return (await engine.cache_statistics()).num_used_blocks


def test_many_streams_equal_llm(make_llm: Callable[..., LLM], make_async: MakeAsync) -> None:
    prompts = [[3 + index % 50] * (1 + index % 7) for index in range(48)]
    params = [
        SamplingParams(
            temperature=max(index % 2, 1e-6),
            seed=index,
            max_tokens=2 + index % 9,
            n=1 + index % 3,
            output_kind=("cumulative", "final_only")[index // 4 % 2],
        )
        for index in range(48)
    ]
    expected = [output.outputs for output in make_llm().generate(prompts, params)]
    engine = make_async(scheduler={"max_num_seqs": 16})

    async def main() -> list[RequestOutput]:
        streams = [engine.generate(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
        return await asyncio.gather(*map(last_output, streams))

    assert [output.outputs for output in asyncio.run(main())] == expected


def test_deltas_add_up(make_async: MakeAsync, hf_greedy: Callable[..., Any]) -> None:
    engine = make_async()

    async def main() -> list[RequestOutput]:
        params = SamplingParams(temperature=0, max_tokens=5, output_kind="delta")
        return [output async for output in engine.generate([5, 6], params)]

    outputs = asyncio.run(main())
    assert all(output.outputs[0].token_ids for output in outputs)
    assert [token for output in outputs for token in output.outputs[0].token_ids] == hf_greedy([5, 6], 5)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_a_cancelled_task_frees_its_blocks(make_async: MakeAsync) -> None:
    engine = make_async()

    async def main() -> None:
        started = asyncio.Event()

        async def consume() -> None:
            async for _ in engine.generate([5, 6], BEGUN):
                started.set()

        task = asyncio.create_task(consume())
        await started.wait()
        assert await used_blocks(engine) > 0
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await used_blocks(engine) == 0
        assert (await last_output(engine.generate([5], SHORT))).finished

    asyncio.run(main())


def test_cancelling_before_the_first_token(make_async: MakeAsync) -> None:
    engine = make_async()

    async def main() -> None:
        tasks = [asyncio.create_task(last_output(engine.generate([5, index], BEGUN))) for index in range(20)]
        for number, task in enumerate(tasks):
            for _ in range(number % 4):
                await asyncio.sleep(0)
            task.cancel()
        assert all(
            isinstance(result, asyncio.CancelledError)
            for result in await asyncio.gather(*tasks, return_exceptions=True)
        )
        assert await used_blocks(engine) == 0

    asyncio.run(main())


def test_leaving_the_loop_aborts(make_async: MakeAsync) -> None:
    engine = make_async()

    async def main() -> None:
        async with aclosing(engine.generate([5, 6], BEGUN)) as stream:
            async for _ in stream:
                break
            assert await used_blocks(engine) > 0
        assert await used_blocks(engine) == 0
        async for _ in engine.generate([5, 6], BEGUN):
            break
        # The event loop closes a generator that nobody holds any more: one turn to make the task, one to run it.
        for _ in range(2):
            await asyncio.sleep(0)
        assert await used_blocks(engine) == 0

    asyncio.run(main())


def test_abort_ends_the_stream_with_a_last_output(make_async: MakeAsync) -> None:
    engine = make_async()

    async def main() -> RequestOutput:
        output = None
        async for output in engine.generate([5, 6], BEGUN, "mine"):
            if not output.finished:
                await engine.abort("mine")
        await engine.abort("nobody")
        assert await used_blocks(engine) == 0
        assert output is not None
        return output

    output = asyncio.run(main())
    assert output.outputs[0].finish_reason == "abort"
    assert len(output.outputs[0].token_ids) == 1


def test_refusals_reach_the_caller_and_nobody_else(make_async: MakeAsync) -> None:
    engine = make_async()

    async def main() -> None:
        other = asyncio.create_task(last_output(engine.generate([5], SHORT)))
        with pytest.raises(RequestError, match="the prompt is empty"):
            await last_output(engine.generate([], SHORT))
        with pytest.raises(RequestError, match="prompt_token_ids holds 128"):
            await last_output(engine.generate([128], SHORT))
        assert (await other).finished

    asyncio.run(main())


def test_a_request_id_in_use_is_refused_and_its_owner_goes_on(make_async: MakeAsync) -> None:
    engine = make_async()

    async def main() -> None:
        outputs = []
        async for output in engine.generate([5], BEGUN, "same"):
            if not outputs:
                with pytest.raises(RequestError, match="'same' is in use"):
                    await last_output(engine.generate([6], SHORT, "same"))
                await engine.resume("same")
            outputs.append(output)
        assert len(outputs[-1].outputs[0].token_ids) == 200
        assert (await last_output(engine.generate([6], SHORT, "same"))).prompt_token_ids == [6]

    asyncio.run(main())


def test_an_id_taken_over_gets_only_its_own_outputs(make_async: MakeAsync) -> None:
    engine = make_async()

    async def main() -> None:
        for number in range(10):
            async with aclosing(engine.generate([5], BEGUN, "same")) as stream:
                await anext(stream)
            outputs = [output async for output in engine.generate([6, number], SHORT, "same")]
            assert {tuple(output.prompt_token_ids) for output in outputs} == {(6, number)}

    asyncio.run(main())


def test_a_cancelled_question_does_not_hurt_the_engine(make_async: MakeAsync) -> None:
    engine = make_async()

    async def main() -> None:
        async with aclosing(engine.generate([5], BEGUN, "mine")) as stream:
            await anext(stream)
            await engine.resume("mine")
            for _ in range(10):
                question = asyncio.create_task(engine.cache_statistics())
                await asyncio.sleep(0)
                question.cancel()
            await anext(stream)
        assert await used_blocks(engine) == 0
        assert engine.is_running

    asyncio.run(main())


def test_shutdown_ends_open_streams_with_an_error(make_async: MakeAsync) -> None:
    engine = make_async()

    async def main() -> None:
        started = [asyncio.Event() for _ in range(3)]

        async def consume(index: int) -> None:
            async for _ in engine.generate([5, index], BEGUN):
                started[index].set()

        tasks = [asyncio.create_task(consume(index)) for index in range(3)]
        for event in started:
            await event.wait()
        engine.shutdown()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, RequestError)
            assert "the engine is shut down" in str(result)
        assert not engine.is_running
        with pytest.raises(RequestError, match="the engine is shut down"):
            await last_output(engine.generate([5], SHORT))
        with pytest.raises(RequestError, match="the engine is shut down"):
            await engine.reset_prefix_cache()

    asyncio.run(main())
    engine.shutdown()


def test_shutdown_while_prompts_are_on_their_way(make_async: MakeAsync) -> None:
    engine = make_async()

    async def main() -> None:
        tasks = [asyncio.create_task(last_output(engine.generate([5], BEGUN))) for _ in range(8)]
        await asyncio.sleep(0)  # the engine's thread has not answered yet
        engine.shutdown()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        assert all(isinstance(result, RequestError) for result in results)

    asyncio.run(main())


DYING = """
from dovetail.attention_backends.sdpa import SDPABackend
from dovetail.contracts.errors import WorkerError

class Dying(SDPABackend):
    def plan(self, batch):
        if batch.max_seq_len == 4:
            raise ValueError("four")
        if batch.max_seq_len > 8:
            raise WorkerError("rank 0 is gone", rank=0)
        super().plan(batch)
"""


def test_a_failed_step_and_a_dead_worker(make_async: MakeAsync, tmp_path: Path) -> None:
    plugin = tmp_path / "dying.py"
    plugin.write_text(DYING)
    engine = make_async(attention=f"{plugin}:Dying")

    async def main() -> None:
        with pytest.raises(RequestError, match="request async-0 failed: ValueError: four"):
            await last_output(engine.generate([5, 6, 7], SHORT))
        assert (await last_output(engine.generate([5] * 5, SamplingParams(max_tokens=2)))).finished
        streams = [engine.generate([5] * 5, LONG) for _ in range(3)]
        for result in await asyncio.gather(*map(last_output, streams), return_exceptions=True):
            assert isinstance(result, WorkerError)
            assert "rank 0 is gone" in str(result)
        assert not engine.is_running
        with pytest.raises(WorkerError, match="rank 0 is gone"):
            await last_output(engine.generate([5], SHORT))

    asyncio.run(main())


def test_several_event_loops_at_once(make_async: MakeAsync, hf_greedy: Callable[..., Any]) -> None:
    engine = make_async()
    found: dict[int, list[int]] = {}

    def serve(token: int) -> None:
        async def main() -> None:
            outputs = await asyncio.gather(*(last_output(engine.generate([token, i], SHORT)) for i in (3, 4)))
            found[token] = [token for output in outputs for token in output.outputs[0].token_ids]

        asyncio.run(main())

    threads = [threading.Thread(target=serve, args=(token,)) for token in (5, 6, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    serve(8)
    assert found == {token: hf_greedy([token, 3], 5) + hf_greedy([token, 4], 5) for token in (5, 6, 7, 8)}


def test_a_loop_that_ends_leaves_nothing_behind(make_async: MakeAsync) -> None:
    engine = make_async()

    async def forget() -> None:
        await anext(engine.generate([5, 6], BEGUN))
        assert await used_blocks(engine) > 0

    asyncio.run(forget())
    assert asyncio.run(used_blocks(engine)) == 0


def test_the_event_loop_is_not_held(
    make_async: MakeAsync, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It beats during each step. Records the largest gap between two beats; how large it may be depends on the
    machine."""
    engine = make_async(scheduler={"max_num_seqs": 64})
    gaps: list[float] = []
    step, beats = engine._engine.step, threading.Event()

    def step_after_a_beat() -> list[RequestOutput]:
        beats.clear()
        assert beats.wait(60)
        return step()

    monkeypatch.setattr(engine._engine, "step", step_after_a_beat)

    async def heartbeat(done: asyncio.Event) -> None:
        last = time.perf_counter()
        while not done.is_set():
            await asyncio.sleep(0)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
            beats.set()

    async def main() -> None:
        done = asyncio.Event()
        beating = asyncio.create_task(heartbeat(done))
        params = SamplingParams(temperature=0, max_tokens=60, output_kind="delta")
        await asyncio.gather(*(last_output(engine.generate([5, index], params)) for index in range(64)))
        done.set()
        await beating

    asyncio.run(main())
    request.node.user_properties.append(("largest_gap_ms", 1e3 * max(gaps)))
    assert len(gaps) >= 60  # at least as often as there were steps


def test_a_loop_closed_without_a_word_aborts_its_requests(
    make_async: MakeAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_async()
    inner = engine._engine
    step, abort_request, closed, aborted = inner.step, inner.abort_request, threading.Event(), []

    def step_once_it_is_closed() -> list[RequestOutput]:
        if inner.core.num_running:  # the first step is free: it brings what the loop waits for
            closed.wait()
        return step()

    monkeypatch.setattr(inner, "step", step_once_it_is_closed)
    monkeypatch.setattr(inner, "abort_request", lambda ids: (aborted.append(ids), abort_request(ids))[1])
    loop = asyncio.new_event_loop()
    stream = engine.generate([5, 6], LONG, "orphan")
    loop.run_until_complete(anext(stream))
    loop.close()
    closed.set()
    assert asyncio.run(last_output(engine.generate([5], SHORT))).finished
    assert aborted == ["orphan"]
    assert asyncio.run(used_blocks(engine)) == 0


LAZY = """
from dovetail.contracts.scheduler import Schedule
from dovetail.schedulers.fcfs import FCFSScheduler

class Lazy(FCFSScheduler):
    def schedule(self, memory):
        return Schedule()
"""


def test_a_broken_scheduler_ends_every_stream(make_async: MakeAsync, tmp_path: Path) -> None:
    plugin = tmp_path / "lazy.py"
    plugin.write_text(LAZY)
    engine = make_async(scheduler={"name": f"{plugin}:Lazy"})

    async def main() -> None:
        streams = [last_output(engine.generate([5, index], SHORT)) for index in range(3)]
        for result in await asyncio.gather(*streams, return_exceptions=True):
            assert isinstance(result, PluginError)

    asyncio.run(main())
    assert engine._engine.request_ids == []


STUMBLING = """
from dovetail.schedulers.fcfs import FCFSScheduler

class Stumbling(FCFSScheduler):
    def schedule(self, memory):
        if any(request.num_tokens > 20 for request in self._running.requests):
            raise {}("I stumble")
        return super().schedule(memory)


class Grumbling(FCFSScheduler):
    def remove(self, request):
        super().remove(request)
        if request.request_id == "rude":
            raise {}("I grumble")
"""


@pytest.mark.parametrize("kind", ["ValueError", "SystemExit"])
def test_whatever_a_scheduler_raises_costs_the_requests_that_run_and_nobody_else(
    make_async: MakeAsync, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "stumbling.py").write_text(STUMBLING.format(kind, kind))
    engine = make_async(scheduler=f"{tmp_path}/stumbling.py:Stumbling")

    async def main() -> None:
        streams = [last_output(engine.generate([5, index], LONG)) for index in range(3)]
        for result in await asyncio.gather(*streams, return_exceptions=True):
            assert isinstance(result, PluginError)
            assert "I stumble" in str(result)
        assert (await last_output(engine.generate([5], SHORT))).finished
        await engine.check_health()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["ValueError", "SystemExit"])
def test_an_abort_at_which_the_scheduler_raises_ends_the_stream_with_that_error(
    make_async: MakeAsync, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "stumbling.py").write_text(STUMBLING.format(kind, kind))
    engine = make_async(scheduler=f"{tmp_path}/stumbling.py:Grumbling")

    async def main() -> None:
        other, stream = engine.generate([5], BEGUN, "other"), engine.generate([5], BEGUN, "rude")
        await asyncio.gather(anext(other), anext(stream))
        with pytest.raises(PluginError, match="I grumble"):
            await engine.abort("rude")
        with pytest.raises(PluginError, match="I grumble"):
            await last_output(stream)
        await engine.resume("other")
        assert len((await last_output(other)).outputs[0].token_ids) == 200

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["ValueError", "SystemExit"])
def test_a_stream_that_is_left_and_at_whose_abort_the_scheduler_raises_hurts_nobody(
    make_async: MakeAsync, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "stumbling.py").write_text(STUMBLING.format(kind, kind))
    engine = make_async(scheduler=f"{tmp_path}/stumbling.py:Grumbling")

    async def main() -> None:
        other, stream = engine.generate([5], BEGUN, "other"), engine.generate([5], BEGUN, "rude")
        await asyncio.gather(anext(other), anext(stream))
        await stream.aclose()
        await engine.resume("other")
        assert len((await last_output(other)).outputs[0].token_ids) == 200
        assert await used_blocks(engine) == 0

    asyncio.run(main())


@pytest.mark.parametrize("request_id", [5, "", b"a"])
def test_what_is_no_request_id_is_refused_at_once(make_async: MakeAsync, request_id: Any) -> None:
    engine = make_async()

    async def main() -> None:
        async with aclosing(engine.generate([5], BEGUN, "other")) as other:
            await anext(other)
            with pytest.raises(RequestError, match="a request id is a string that is not empty"):
                await last_output(engine.generate([5], SHORT, request_id))
            with pytest.raises(RequestError, match="a request id is a string that is not empty"):
                await engine.abort(request_id)
            await engine.resume("other")
            await anext(other)
        assert engine.is_running

    asyncio.run(main())


LEAVING = """
from dovetail.attention_backends.sdpa import SDPABackend

class Leaving(SDPABackend):
    def plan(self, batch):
        if batch.max_seq_len > 20:
            raise {}("I leave")
        super().plan(batch)
"""


@pytest.mark.parametrize("kind", ["SystemExit", "KeyboardInterrupt"])
def test_a_plugin_that_exits_costs_the_requests_that_run_and_nobody_else(
    make_async: MakeAsync, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "leaving.py").write_text(LEAVING.format(kind))
    engine = make_async(attention=f"{tmp_path}/leaving.py:Leaving")

    async def main() -> None:
        streams = [last_output(engine.generate([5, index], LONG)) for index in range(3)]
        for result in await asyncio.gather(*streams, return_exceptions=True):
            assert isinstance(result, PluginError)
            assert f"{kind} (I leave)" in str(result)
        assert (await last_output(engine.generate([5], SHORT))).finished

    asyncio.run(main())


def test_a_question_that_makes_a_plugin_exit_is_answered_with_an_error(
    make_async: MakeAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_async()
    monkeypatch.setattr(engine._engine, "reset_prefix_cache", lambda: exit(3))
    with pytest.raises(PluginError, match="SystemExit"):
        asyncio.run(engine.reset_prefix_cache())
    assert engine.is_running


@pytest.mark.parametrize("kind", ["delta", "cumulative"])
def test_what_is_not_read_is_merged(make_async: MakeAsync, make_llm: Callable[..., LLM], kind: Any) -> None:
    params = SamplingParams(temperature=1e-6, max_tokens=60, ignore_eos=True, n=2, logprobs=1, output_kind=kind)
    (expected,) = make_llm().generate([[5, 6]], params)
    engine = make_async()

    async def main() -> list[RequestOutput]:
        stream = engine.generate([5, 6], params)
        outputs = [await anext(stream)]
        while await used_blocks(engine):  # nobody reads while it runs
            pass
        return outputs + [output async for output in stream]

    outputs = asyncio.run(main())
    assert len(outputs) <= 3
    assert outputs[-1].finished
    for index, wanted in enumerate(expected.outputs):
        parts = [c for output in outputs for c in output.outputs if c.index == index]
        parts = parts if kind == "delta" else parts[-1:]
        assert [token for part in parts for token in part.token_ids] == wanted.token_ids
        assert [entry for part in parts for entry in part.logprobs or ()] == wanted.logprobs
        assert parts[-1].finish_reason == "length"


def test_an_engine_that_is_dropped_ends(make_llm: Callable[..., LLM]) -> None:
    engine = AsyncLLMEngine(make_llm().engine)
    inner, thread, gone = engine._engine, engine._steps._thread, weakref.ref(engine)
    asyncio.run(last_output(engine.generate([5], SHORT)))
    del engine
    gc.collect()
    assert gone() is None
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert inner.is_closed


BLOCKING = """
from pathlib import Path
from dovetail.attention_backends.sdpa import SDPABackend

class Blocking(SDPABackend):
    def plan(self, batch):
        if batch.max_seq_len == 6:
            Path({0!r}).write_text("here")
            Path({1!r}).read_text()
        super().plan(batch)
"""


def test_shutdown_leaves_a_step_in_this_process_that_hangs(
    make_llm: Callable[..., LLM], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arrived, fifo = tmp_path / "arrived", tmp_path / "fifo"
    os.mkfifo(arrived)
    os.mkfifo(fifo)
    (tmp_path / "blocking.py").write_text(BLOCKING.format(str(arrived), str(fifo)))
    engine = AsyncLLMEngine(make_llm(attention=f"{tmp_path}/blocking.py:Blocking").engine)
    thread = engine._steps._thread

    async def main() -> None:
        stream = engine.generate([5, 6], LONG)
        await anext(stream)
        arrived.read_text()
        question = asyncio.create_task(engine.cache_statistics())
        await asyncio.sleep(0)
        engine.shutdown(timeout_s=0.2)
        with pytest.raises(RequestError, match="the engine is shut down"):
            await last_output(stream)
        with pytest.raises(RequestError, match="the engine is shut down"):
            await question

    asyncio.run(main())
    assert "a step still runs" in caplog.text
    assert not engine.is_running
    assert not engine._engine.is_closed
    fifo.write_text("go on")
    thread.join(timeout=60)
    engine._engine.shutdown()
    assert engine._engine.is_closed
