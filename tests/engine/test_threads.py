"""Several threads in one engine: `LLM` serves them all, `LLMEngine` refuses the second; forks are refused."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, AsyncLLMEngine, BeamSearchParams, LLMEngine, SamplingParams
from dovetail.contracts.errors import RequestError, WorkerError
from dovetail.contracts.telemetry import StepStats, TelemetrySink

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PLAIN: dict[str, Any] = {"attention": "sdpa", "model": {"operators": None}}


class OnStep(TelemetrySink):
    """Calls a function in every step."""

    contract = (1, 0)

    def __init__(self, call: Callable[[StepStats], object]):
        self.on_step = call  # type: ignore[method-assign]


def tokens(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return llm.generate([prompt], params)[0].outputs[0].token_ids


def test_threads_of_one_llm_get_the_tokens_that_each_would_get_alone(
    make_llm: Callable[..., LLM], hf_greedy: Callable[..., Any]
) -> None:
    llm = make_llm(**PLAIN)
    prompts = [[[3 + thread, 5 + turn, 7] for turn in range(8)] for thread in range(6)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda mine: [tokens(llm, prompt) for prompt in mine], prompts))
    assert found == [[hf_greedy(prompt, 12) for prompt in mine] for mine in prompts]
    assert tokens(llm, [3, 5, 7]) == hf_greedy([3, 5, 7], 12)


def test_requests_of_several_threads_are_batched(make_llm: Callable[..., LLM], hf_greedy: Callable[..., Any]) -> None:
    llm = make_llm()
    decoded: list[int] = []
    begun = threading.Event()

    def on_step(stats: StepStats) -> None:
        decoded.append(stats.num_decoded)
        if not begun.is_set():  # or the first might be done before the second comes
            llm.engine.hold(llm.engine.request_ids)
            begun.set()
        elif stats.num_running == 2:
            llm.engine.resume(llm.engine.request_ids)

    llm.engine.add_telemetry_sink(OnStep(on_step))
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(tokens, llm, [5, 6], LONG)
        begun.wait()
        short = pool.submit(tokens, llm, [7, 8], GREEDY)
        assert short.result() == hf_greedy([7, 8], 12)
        assert long.result() == hf_greedy([5, 6], 200)
    assert decoded.count(2) == 11  # all steps of the short one but its first


def test_all_calls_of_an_llm_may_come_from_several_threads(
    make_llm: Callable[..., LLM], hf_greedy: Callable[..., Any]
) -> None:
    llm = make_llm()
    beams = llm.beam_search([[9, 8]], BeamSearchParams(beam_width=2, max_tokens=4), use_tqdm=False)
    statistics = llm.engine.cache_statistics()

    def search() -> None:
        assert llm.beam_search([[9, 8]], BeamSearchParams(beam_width=2, max_tokens=4), use_tqdm=False) == beams

    def generate() -> None:
        assert tokens(llm, [5, 6]) == hf_greedy([5, 6], 12)

    def look() -> None:
        llm.reset_prefix_cache()
        assert llm.engine.cache_statistics().num_blocks == statistics.num_blocks
        llm.engine.speculation_totals()

    with ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(call) for _ in range(8) for call in (search, generate, look)]
        for call in calls:
            call.result()


def test_sleeping_waits_for_the_step_and_wakes_for_all(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    before = tokens(llm, [5, 6])
    with ThreadPoolExecutor(1) as pool:
        pool.submit(llm.engine.sleep).result()
        with pytest.raises(RequestError, match="sleeps"):
            tokens(llm, [5, 6])
        pool.submit(llm.engine.wake_up).result()
    assert tokens(llm, [5, 6]) == before


def test_shutting_down_ends_what_another_thread_generates(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    begun = threading.Event()

    def on_step(stats: StepStats) -> None:
        begun.set()
        deadline = time.monotonic() + 60
        while not llm.engine.tokens.use._waiting and time.monotonic() < deadline:
            time.sleep(0.001)  # until the shutdown is in the queue: it has the engine next

    llm.engine.add_telemetry_sink(OnStep(on_step))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(tokens, llm, [5, 6], LONG)
        begun.wait()
        llm.shutdown()
        with pytest.raises(WorkerError, match="shut down"):
            call.result(timeout=60)


DYING = """
from dovetail.attention_backends.sdpa import SDPABackend
from dovetail.contracts.errors import WorkerError

class Dying(SDPABackend):
    def plan(self, batch):
        if batch.max_seq_len > 30:
            raise WorkerError("rank 0 is gone", rank=0)
        super().plan(batch)
"""


def test_what_ends_the_engine_is_raised_in_every_thread(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    llm = make_llm(attention=f"{tmp_path}/dying.py:Dying")
    llm.pause("keep")  # until both are there: the engine may be dead before a thread comes

    def run(token: int) -> WorkerError:
        with pytest.raises(WorkerError, match="rank 0 is gone") as caught:
            tokens(llm, [token], LONG)
        return caught.value

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(run, token) for token in (5, 6)]
        try:
            while len(llm.engine.request_ids) < 2:
                assert not any(call.done() for call in calls)
                time.sleep(0.001)
        finally:
            llm.resume()
        first, second = (call.result() for call in calls)
    assert first is not second
    assert first.rank == second.rank == 0


@pytest.fixture
def in_a_step(make_llm: Callable[..., LLM], tiny_llama: tuple[Path, Any]) -> Iterator[LLMEngine]:
    """An `LLMEngine` in which a thread named "driver" is, in the middle of a step."""
    config = make_llm().engine.config
    engine = LLMEngine(config)
    inside, leave = threading.Event(), threading.Event()
    engine.add_telemetry_sink(OnStep(lambda stats: (inside.set(), leave.wait())))
    engine.add_request("first", [5, 6], SamplingParams(temperature=0, max_tokens=1))
    driver = threading.Thread(target=engine.step, name="driver")
    driver.start()
    inside.wait()
    try:
        yield engine
    finally:
        leave.set()
        driver.join()
        assert not engine.has_unfinished_requests()
        engine.shutdown()


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.step(),
        lambda engine: engine.add_request("second", [5], GREEDY),
        lambda engine: engine.abort_request("first"),
        lambda engine: engine.reset_prefix_cache(),
        lambda engine: engine.cache_statistics(),
        lambda engine: engine.speculation_totals(),
        lambda engine: engine.sleep(),
        lambda engine: engine.wake_up(),
        lambda engine: engine.forget_finished(),
    ],
    ids=lambda call: call.__code__.co_names[0],
)
def test_a_second_thread_in_an_llm_engine_is_refused(in_a_step: LLMEngine, call: Callable[[LLMEngine], object]) -> None:
    with pytest.raises(RequestError, match="while thread 'driver' is in it: one thread at a time"):
        call(in_a_step)


def test_an_llm_engine_may_pass_from_thread_to_thread(
    make_llm: Callable[..., LLM], hf_greedy: Callable[..., Any]
) -> None:
    with LLMEngine(make_llm().engine.config) as engine:
        engine.add_request("one", [5, 6], GREEDY)
        with ThreadPoolExecutor(1) as pool:
            for _ in range(6):
                pool.submit(engine.step).result()
                outputs = engine.step()
        assert outputs[-1].outputs[0].token_ids == hf_greedy([5, 6], 12)


@contextmanager
def forked(told: Path) -> Iterator[bool]:
    """True in a child process, whose error is written to `told` and which ends with the block; False in the parent,
    where the block is passed over and the child has ended well when it is left."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks in processes with threads
        child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)  # a child that hangs is killed
        try:
            yield True
        except BaseException as error:
            told.write_text(f"{type(error).__name__}: {error}")
        finally:
            os._exit(0)
    yield False
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda llm: llm.generate([[5, 6]], GREEDY),
        lambda llm: llm.beam_search([[5, 6]], BeamSearchParams(beam_width=2, max_tokens=2)),
        lambda llm: llm.engine.step(),
        lambda llm: llm.engine.cache_statistics(),
    ],
    ids=["generate", "beam_search", "step", "cache_statistics"],
)
def test_a_fork_of_the_engines_process_is_refused(
    make_llm: Callable[..., LLM], hf_greedy: Callable[..., Any], tmp_path: Path, use: Callable[[LLM], object]
) -> None:
    llm = make_llm(executor={"threads": 2})
    assert tokens(llm, [5, 6]) == hf_greedy([5, 6], 12)
    told = tmp_path / "told"
    with forked(told) as is_child:
        if is_child:
            with llm:  # leaving must do nothing either
                use(llm)
    assert told.read_text().startswith("WorkerError: this engine was made in process")
    assert tokens(llm, [7, 8]) == hf_greedy([7, 8], 12)


def test_a_fork_computes_with_one_thread_or_says_so(
    make_llm: Callable[..., LLM], hf_greedy: Callable[..., Any], tmp_path: Path
) -> None:
    make_llm(executor={"threads": 2})
    told = tmp_path / "told"
    with forked(told) as is_child:
        if is_child:
            make_llm(executor={"threads": 2})
    assert told.read_text().startswith("WorkerError: process")
    assert "executor.threads to 1" in told.read_text()
    with forked(told) as is_child:
        if is_child:
            told.write_text(str(tokens(make_llm(executor={"threads": 1}), [5, 6])))
    assert told.read_text() == str(hf_greedy([5, 6], 12))


def test_a_fork_of_an_async_engines_process_is_refused(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    engine = AsyncLLMEngine(make_llm().engine)

    async def generate() -> None:
        async for _ in engine.generate([5, 6], GREEDY):
            pass

    asyncio.run(generate())
    for call in (generate, engine.cache_statistics):
        told = tmp_path / call.__name__
        with forked(told) as is_child:
            if is_child:
                assert not engine.is_running
                with engine:
                    asyncio.run(call())
        assert told.read_text().startswith("WorkerError: this engine was made in process")
    asyncio.run(generate())
    engine.shutdown()
