"""An engine in another process gives the outputs of one in this process, and survives its clients."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from dovetail import AsyncLLMEngine, RequestOutput, SamplingParams
from dovetail.config.load import load_config
from dovetail.contracts.engine_client import EngineClient
from dovetail.contracts.errors import ConfigError, ModelError, QueueFull, RequestError, WorkerError
from dovetail.engine.remote import answer_watch
from dovetail.engine.remote import client as client_module
from dovetail.engine.remote.client import RemoteEngine
from dovetail.engine.remote.engine_process import EngineProcess
from tests.engine.remote.conftest import stop

WithRemote = Callable[[Callable[[RemoteEngine], Awaitable[Any]]], Any]

PROMPT = "Once upon a time there was"
CASES = {
    "greedy": {"temperature": 0.0, "max_tokens": 24},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 5, "max_tokens": 24},
    "several": {"temperature": 1.0, "seed": 7, "n": 3, "max_tokens": 12},
    "ranked": {"temperature": 1.0, "seed": 7, "n": 2, "best_of": 4, "max_tokens": 12},
    "logprobs": {"temperature": 1.0, "seed": 3, "logprobs": 3, "prompt_logprobs": 2, "max_tokens": 6},
    "stop string": {"temperature": 0.0, "stop": ["a", "zzz"], "max_tokens": 40},
    "stop string in a later token": {"temperature": 1.0, "seed": 1, "stop": ["."], "min_tokens": 3, "max_tokens": 60},
    "stop string included": {
        "temperature": 0.0,
        "stop": ["a"],
        "include_stop_str_in_output": True,
        "logprobs": 1,
        "max_tokens": 40,
    },
    "drafts": {"temperature": 0.0, "speculation": "lookup", "max_tokens": 90},
    "drafts of several": {"temperature": 0.3, "seed": 2, "n": 2, "speculation": "lookup", "max_tokens": 90},
    "drafts to a stop string": {"temperature": 0.0, "speculation": "lookup", "stop": ["cat was"], "max_tokens": 90},
    "bias": {"temperature": 0.0, "logit_bias": {17: 30.0}, "allowed_token_ids": [17, 18, 19], "max_tokens": 5},
    "bad words": {"temperature": 0.0, "bad_words": ["the", "a"], "repetition_penalty": 1.2, "max_tokens": 20},
}


NEW = SamplingParams(max_tokens=200, ignore_eos=True, extra={"held": "new"})
BEGUN = replace(NEW, extra={"held": "begun"})
"""Requests that run for long, and are held where HOLDING of tests/conftest.py says: however late a test goes on, they
are under way."""


async def collect(engine: EngineClient, params: SamplingParams, prompt: Any = PROMPT) -> list[RequestOutput]:
    """The outputs of a request."""
    return [output async for output in await engine.submit(prompt, params)]


def told(outputs: list[RequestOutput]) -> Any:
    """What deltas amount to, or what the last output says."""
    found: dict[int, list[Any]] = {}
    for output in outputs if outputs[-1].is_delta else outputs[-1:]:
        for each in output.outputs:
            mine = found.setdefault(each.index, ["", [], [], [], None, None])
            mine[0] += each.text
            mine[3] += [(len(mine[1]) + start, count) for start, count in each.accepted_spans]
            mine[1] += each.token_ids
            mine[2] += each.logprobs or []
            mine[4:] = each.finish_reason, each.stop_reason
    last = outputs[-1]
    return found, last.prompt_token_ids, last.prompt, last.prompt_logprobs, last.metrics.num_generated_tokens


@pytest.mark.parametrize("kind", ["delta", "cumulative", "final_only"])
@pytest.mark.parametrize("case", CASES)
def test_outputs_are_those_of_an_engine_in_this_process(
    case: str, kind: str, with_remote: WithRemote, local_engine: AsyncLLMEngine
) -> None:
    params = SamplingParams(output_kind=kind, **CASES[case])  # type: ignore[arg-type]
    expected = asyncio.run(collect(local_engine, params))
    outputs = with_remote(lambda engine: collect(engine, params))
    assert told(outputs) == told(expected)
    assert outputs[-1].finished
    has_spans = any(completion.accepted_spans for output in outputs for completion in output.outputs)
    assert has_spans == ("speculation" in CASES[case])


def test_a_prediction_reaches_the_drafter(with_remote: WithRemote, local_engine: AsyncLLMEngine) -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=40, output_kind="final_only", ignore_eos=True)
    (expected,) = asyncio.run(collect(local_engine, plain))
    params = replace(plain, speculation="predicted", prediction=expected.outputs[0].text)
    (output,) = with_remote(lambda engine: collect(engine, params))
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.metrics.num_accepted_from_prediction > 20


def test_several_clients_get_what_is_theirs(engine_process: EngineProcess, local_engine: AsyncLLMEngine) -> None:
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=30, output_kind="delta") for seed in range(6)]

    async def main() -> list[list[RequestOutput]]:
        clients = [await RemoteEngine.connect(engine_process.address, 60) for _ in range(3)]
        try:
            return await asyncio.gather(*(collect(clients[i % 3], each) for i, each in enumerate(params)))
        finally:
            await asyncio.gather(*(client.close() for client in clients))

    for each, outputs in zip(params, asyncio.run(main()), strict=True):
        assert told(outputs) == told(asyncio.run(collect(local_engine, each)))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [10**9]}, "no token id"),
        ({"prompt": [5], "sampling_params": SamplingParams(logprobs=1000)}, "logprobs is 1000"),
        ({"prompt": [5], "sampling_params": SamplingParams(processors={"x": 1})}, "no logits processor 'x'"),
        ({"prompt": [5], "sampling_params": SamplingParams(speculation="x")}, "no drafter 'x' is configured"),
        ({"prompt": [5], "priority": "high"}, "priority must be an integer"),
        ({"prompt": [5], "cache_salt": 5}, "cache_salt must be text"),
        ({"prompt": [5], "request_id": ""}, "a request id is a string"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_runs(
    keywords: dict[str, Any], message: str, with_remote: WithRemote
) -> None:
    async def main(engine: RemoteEngine) -> None:
        with pytest.raises(RequestError, match=message):
            await engine.submit(**keywords)
        assert (await collect(engine, SamplingParams(max_tokens=2)))[-1].finished

    with_remote(main)


def test_a_plan_is_that_of_an_engine_in_this_process(with_remote: WithRemote, local_engine: AsyncLLMEngine) -> None:
    params = SamplingParams(max_tokens=500, speculation="lookup")
    expected = asyncio.run(local_engine.plan_request(PROMPT, params))
    assert with_remote(lambda engine: engine.plan_request(PROMPT, params)) == expected
    assert (expected.drafter, expected.num_prompt_tokens + expected.max_tokens) == ("lookup", 256)

    async def refused(engine: RemoteEngine) -> None:
        with pytest.raises(RequestError, match="no drafter 'x' is configured"):
            await engine.plan_request(PROMPT, SamplingParams(speculation="x"))

    with_remote(refused)


def test_a_request_is_explained_by_any_client_while_it_runs_and_afterwards(
    engine_process: EngineProcess, with_remote: WithRemote
) -> None:
    async def main(engine: RemoteEngine) -> None:
        params = replace(BEGUN, temperature=0, speculation="lookup")
        stream = await engine.submit(PROMPT, params, "told-0", priority=2, cache_salt="salt")
        outputs = aiter(stream)
        await anext(outputs)
        async with await RemoteEngine.connect(engine_process.address, 60) as other:
            # The step after the one of its first token holds it.
            while (running := (await other.explain_request("told")).requests[0]).state == "running":
                await asyncio.sleep(0)
            await engine.call("resume", request_ids="told-0")
            last = [output async for output in outputs][-1]
            (ended,) = (await other.explain_request("told-0")).requests
            unknown = await other.explain_request("tol")
        assert (running.state, running.stats.finish_reason) == ("held", "")
        assert (ended.state, ended.stats.finish_reason) == ("finished", "length")
        assert (running.stats.num_generated_tokens, ended.stats.num_generated_tokens) == (1, 200)
        assert (ended.stats.priority, ended.stats.is_salted, ended.stats.drafter) == (2, True, "lookup")
        assert ended.stats.num_accepted == last.metrics.num_accepted
        assert ended.stats.accepted_per_position == tuple(last.metrics.accepted_per_position)
        assert unknown.requests == ()

    with_remote(main)


def test_an_id_that_no_request_had_is_explained_by_nothing(with_remote: WithRemote) -> None:
    async def main(engine: RemoteEngine) -> None:
        with pytest.raises(RequestError, match="a request id is a string"):
            await engine.explain_request("")
        found = await engine.explain_request("never")
        assert (found.requests, found.num_kept) == ((), 1000)

    with_remote(main)


def test_an_id_in_use_is_refused_also_where_another_client_has_it(
    engine_process: EngineProcess, with_remote: WithRemote
) -> None:
    async def main(engine: RemoteEngine) -> None:
        first = await engine.submit(PROMPT, BEGUN, "same")
        await anext(aiter(first))  # a resume before it is held would come too early
        with pytest.raises(RequestError, match="'same' is in use"):
            await engine.submit(PROMPT, BEGUN, "same")
        async with await RemoteEngine.connect(engine_process.address, 60) as other:
            with pytest.raises(RequestError, match="'same' is in use"):
                await other.submit(PROMPT, BEGUN, "same")
        await engine.call("resume", request_ids="same")
        assert [output async for output in first][-1].finished

    with_remote(main)


def test_a_stream_that_is_closed_frees_its_blocks(with_remote: WithRemote) -> None:
    async def main(engine: RemoteEngine) -> None:
        stream = await engine.submit(PROMPT, BEGUN)
        await anext(aiter(stream))
        assert (await engine.call("cache_statistics"))["num_used_blocks"]
        stream.close()
        with pytest.raises(StopAsyncIteration):
            await anext(aiter(stream))

    with_remote(main)  # waits until no block is held


def test_an_abort_ends_the_stream_with_its_reason(with_remote: WithRemote) -> None:
    async def main(engine: RemoteEngine) -> str | None:
        stream = await engine.submit(PROMPT, BEGUN, "mine")
        await anext(aiter(stream))
        await engine.abort("mine")
        return [output async for output in stream][-1].outputs[0].finish_reason

    assert with_remote(main) == "abort"


def test_a_submission_that_is_cancelled_leaves_nothing_behind(with_remote: WithRemote) -> None:
    async def main(engine: RemoteEngine) -> None:
        for rounds in range(20):
            task = asyncio.create_task(engine.submit(PROMPT, SamplingParams(max_tokens=220, ignore_eos=True)))
            for _ in range(rounds):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled():
                task.result().close()

    with_remote(main)


CLIENT = """
import asyncio, sys
from dovetail import SamplingParams
from dovetail.engine.remote.client import RemoteEngine

async def main():
    engine = await RemoteEngine.connect(sys.argv[1], 60)
    params = SamplingParams(max_tokens=240, ignore_eos=True, extra={"held": "begun"})
    streams = [await engine.submit([5, 6, i], params) for i in range(4)]
    await anext(aiter(streams[0]))
    print("torch" in sys.modules, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_client_that_is_killed_loses_only_its_own_requests(
    engine_process: EngineProcess, with_remote: WithRemote
) -> None:
    with subprocess.Popen([sys.executable, "-c", CLIENT, engine_process.address], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        imported_torch = process.stdout.readline()

        async def main(engine: RemoteEngine) -> bool:
            stream = await engine.submit(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
            process.kill()
            return [output async for output in stream][-1].finished

        assert with_remote(main)
    assert imported_torch == b"False\n"


def test_a_client_that_stands_still_gets_all_of_it_later(
    engine_process: EngineProcess, local_engine: AsyncLLMEngine
) -> None:
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=200, ignore_eos=True, output_kind="delta")

    async def main() -> list[RequestOutput]:
        reader = await RemoteEngine.connect(engine_process.address, 60)
        stream = await reader.submit(PROMPT, params)
        # The loop of the reader stands still meanwhile: a second client, on a loop of its own, sees the engine idle.
        await asyncio.get_running_loop().run_in_executor(None, lambda: None)
        other = subprocess.run(
            [sys.executable, "-c", UNTIL_IDLE, engine_process.address], check=True, capture_output=True, text=True
        )
        assert other.stdout == "idle\n"
        outputs = [output async for output in stream]
        await reader.close()
        return outputs

    outputs = asyncio.run(main())
    assert told(outputs) == told(asyncio.run(collect(local_engine, params)))


UNTIL_IDLE = """
import asyncio, sys
from dovetail.engine.remote.client import RemoteEngine

async def main():
    async with await RemoteEngine.connect(sys.argv[1], 60) as engine:
        while (await engine.call("cache_statistics"))["num_used_blocks"]:
            await asyncio.sleep(0)
        print("idle")

asyncio.run(main())
"""


def test_an_engine_that_dies_fails_what_is_under_way_and_the_next_one_serves(
    start_engine: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    async def main() -> None:
        with start_engine(tmp_path) as first:
            first.wait()
            engine = await RemoteEngine.connect(first.address, 60)
            stream = await engine.submit(PROMPT, BEGUN)
            await anext(aiter(stream))
            os.kill(first.pid, signal.SIGKILL)
            with pytest.raises(WorkerError, match="ended while the request was under way"):
                async for _ in stream:
                    pass
            assert not engine.is_running
            with pytest.raises(WorkerError, match="no engine is running: this client waits"):
                await engine.submit(PROMPT)
        with start_engine(tmp_path) as second:
            second.wait()
            await asyncio.wait_for(engine.wait_until_running(), 60)
            assert (await collect(engine, SamplingParams(max_tokens=3)))[-1].finished
            await engine.close()

    asyncio.run(main())


def test_an_idle_engine_ends_with_a_worker(
    start_engine: Callable[..., EngineProcess], capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a request, so that it is started again before one comes."""
    with start_engine(executor={"name": "multiproc", "tensor_parallel": 2, "threads": 1}) as process:
        process.wait()
        ranks = psutil.Process(process.pid).children()
        ranks[1].kill()
        assert process.join() == 1
        assert not psutil.wait_procs(ranks, timeout=10)[1]
    assert re.search(r"the engine ends: worker rank \d \(pid \d+\) was killed by SIGKILL", capfd.readouterr().err)


def test_clients_hear_which_worker_ended_the_engine(start_engine: Callable[..., EngineProcess]) -> None:
    killed = r"worker rank 1 \(pid \d+\) was killed by SIGKILL"

    async def main(process: EngineProcess) -> None:
        async with (
            await RemoteEngine.connect(process.address, 60) as one,
            await RemoteEngine.connect(process.address, 60) as other,
        ):
            stream = await one.submit(PROMPT, BEGUN)
            await anext(aiter(stream))
            psutil.Process(process.pid).children()[1].kill()
            with pytest.raises(WorkerError, match=f"ended while the request was under way: {killed}"):
                await anext(aiter(stream))
            for engine in (one, other):
                await asyncio.wait_for(engine.wait_until_down(), 60)
                with pytest.raises(WorkerError, match=f"no engine is running: .*; the last one ended: {killed}"):
                    await engine.submit(PROMPT)

    with start_engine(executor={"name": "multiproc", "tensor_parallel": 2, "threads": 1}) as process:
        process.wait()
        asyncio.run(main(process))


def test_an_engine_that_stands_still_is_noticed_and_goes_on(
    engine_process: EngineProcess, with_remote: WithRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "HEALTH_S", 0.2)

    async def main(engine: RemoteEngine) -> None:
        stop(engine_process)
        try:
            with pytest.raises(WorkerError, match="has not answered"):
                await engine.check_health()
        finally:
            os.kill(engine_process.pid, signal.SIGCONT)
        monkeypatch.setattr(client_module, "HEALTH_S", 60.0)
        await engine.check_health()
        assert (await collect(engine, SamplingParams(max_tokens=3)))[-1].finished

    with_remote(main)


def test_requests_that_a_stuck_engine_does_not_answer_are_given_up(
    engine_process: EngineProcess, with_remote: WithRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_watch, "PATIENCE_S", 0.01)

    async def main(engine: RemoteEngine) -> None:
        stream = await engine.submit(PROMPT, BEGUN, "begun")
        await anext(aiter(stream))
        monkeypatch.setattr(client_module, "HEALTH_S", 0.2)
        stop(engine_process)
        try:
            with pytest.raises(WorkerError, match="has not answered"):
                await engine.submit(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True), "given-up")
            with pytest.raises(WorkerError, match="has not answered"):
                await engine.submit(PROMPT)
        finally:
            os.kill(engine_process.pid, signal.SIGCONT)
        monkeypatch.setattr(client_module, "HEALTH_S", 60.0)
        await engine.call("resume", request_ids="begun")
        assert [output async for output in stream][-1].finished
        await until_answered(engine)
        assert (await collect(engine, SamplingParams(max_tokens=3)))[-1].finished

    with_remote(main)  # waits until no block is held, by the request that was given up either


async def until_answered(engine: RemoteEngine) -> None:
    """Returns once the engine takes requests again."""
    while True:
        try:
            (await engine.submit(PROMPT, SamplingParams(max_tokens=1))).close()
        except WorkerError:
            await asyncio.sleep(0)
        else:
            return


def test_requests_that_wait_for_an_answer_are_bounded(
    start_engine: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    async def main(process: EngineProcess) -> None:
        async with await RemoteEngine.connect(process.address, 60) as engine:
            params = SamplingParams(max_tokens=2)
            stop(process)
            tasks = [asyncio.create_task(engine.submit(PROMPT, params)) for _ in range(5)]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                os.kill(process.pid, signal.SIGCONT)
            (first, *_) = done
            assert isinstance(first.exception(), QueueFull)
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            assert sum(isinstance(answer, QueueFull) for answer in answers) >= 2

    with start_engine(tmp_path, server={"max_num_waiting": 3}) as process:
        process.wait()
        asyncio.run(main(process))


def test_what_keeps_an_engine_from_starting_is_raised_here(tmp_path: Path) -> None:
    for sections, error in (
        ({"model": {"path": str(tmp_path / "none")}}, ModelError),
        ({"model": {"path": str(tmp_path)}, "scheduler": {"name": "fcsf"}}, (ConfigError, ModelError)),
    ):
        with EngineProcess(load_config(None, keywords=sections, overrides=())) as process, pytest.raises(error):
            process.wait()


def test_an_engine_ends_with_the_process_that_started_it(sections: dict[str, Any], tmp_path: Path) -> None:
    script = (
        "import sys, json, os, signal\n"
        "from dovetail.config.load import load_config\n"
        "from dovetail.engine.remote.engine_process import EngineProcess\n"
        "if __name__ == '__main__':\n"
        "    config = load_config(None, keywords=json.loads(sys.argv[1]), overrides=())\n"
        "    process = EngineProcess(config, sys.argv[2])\n"
        "    process.wait()\n"
        "    print(process.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    import json

    import psutil

    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(sections), str(tmp_path)], capture_output=True, text=True, check=False
    )
    pid = int(done.stdout)
    with suppress(psutil.NoSuchProcess):
        psutil.wait_procs([psutil.Process(pid)], timeout=60)
    assert not psutil.pid_exists(pid)


def test_no_engine_at_the_address_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="no engine answers"):
        asyncio.run(RemoteEngine.connect(f"ipc://{tmp_path}/none", 0.1))


def test_a_queue_that_is_full_refuses_with_when_to_try_again(
    start_engine: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    async def main(address: str) -> None:
        async with await RemoteEngine.connect(address, 60) as engine:
            running = await engine.submit(PROMPT, BEGUN)
            await anext(aiter(running))
            waiting = [await engine.submit(PROMPT, NEW, name) for name in ("second", "third")]
            with pytest.raises(QueueFull, match="2 requests wait already") as caught:
                await engine.submit(PROMPT, NEW)
            assert caught.value.retry_after_s > 0
            running.close()
            await engine.call("resume", request_ids=["second", "third"])
            assert all([(await anext(aiter(stream))).outputs for stream in waiting])

    one_at_a_time = {"scheduler": {"name": "priority", "max_num_seqs": 1}, "server": {"max_num_waiting": 2}}
    with start_engine(tmp_path, **one_at_a_time) as process:
        process.wait()
        asyncio.run(main(process.address))
