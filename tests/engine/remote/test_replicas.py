"""Several engines that serve as one: requests are routed, retried and failed, and the router knows the caches."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dovetail import AsyncLLMEngine, RequestOutput, SamplingParams
from dovetail.contracts.errors import RequestError, WorkerError
from dovetail.contracts.lora import AdapterConflict, LoRARequest
from dovetail.contracts.router import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    FollowsRequests,
    Router,
    RouterSetup,
)
from dovetail.contracts.telemetry import Exposition
from dovetail.engine.remote import answer_watch
from dovetail.engine.remote import client as client_module
from dovetail.engine.remote.client import RemoteEngine
from dovetail.engine.remote.engine_process import EngineProcess
from dovetail.engine.replicas import fleet as fleet_module
from dovetail.engine.replicas.engine import ReplicatedEngine
from dovetail.engine.replicas.exposition import labelled
from dovetail.engine.replicas.state import EngineState, bring_to
from dovetail.plugins.routers.prefix_aware import PrefixAware, PrefixAwareOptions
from dovetail.plugins.routers.round_robin import RoundRobin
from dovetail.testing.tiny_adapters import save_adapter
from tests.engine.remote.conftest import silent

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TEXTS = [
    "The old man sat by the sea",
    "The cat was",
    "A dark night",
    "The old man sat by the sea and looked",
    "x",
    "The",
]
Create = Callable[[RouterSetup], Router]


@pytest.fixture(scope="module")
def processes(start_engine: Callable[..., EngineProcess]) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """Two engines that all tests here share which leave them alive. No others: replicas must be alike, and what a test
    of one engine leaves there, adapters or weights, the other would not have."""
    with start_engine() as one, start_engine() as other:
        one.wait()
        other.wait()
        yield one, other


@pytest.fixture
def pair(processes: tuple[EngineProcess, EngineProcess]) -> tuple[str, str]:
    """Their addresses."""
    return processes[0].address, processes[1].address


@asynccontextmanager
async def replicas(addresses: tuple[str, ...], create: Create, **options: Any) -> AsyncIterator[ReplicatedEngine]:
    async with await ReplicatedEngine.connect(addresses, create, timeout_s=60, **options) as engine:
        yield engine


def prefix_aware(setup: RouterSetup) -> Router:
    return PrefixAware(PrefixAwareOptions(), setup)


def round_robin(setup: RouterSetup) -> Router:
    return RoundRobin(RoundRobin.Options(), setup)


class Recording(RoundRobin, FollowsRequests):
    """Notes what it hears of requests."""

    def __init__(self, setup: RouterSetup):
        super().__init__(RoundRobin.Options(), setup)
        self.heard: list[str] = []

    def prefilled(self, request_id: str) -> None:
        self.heard.append(f"prefilled {request_id}")

    def finished(self, request_id: str) -> None:
        self.heard.append(f"finished {request_id}")

    def replica_lost(self, replica: int) -> None:
        self.heard.append(f"lost {replica}")


async def last_of(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    *_, last = [output async for output in stream]
    return last


def run_over_two(
    start_engine: Callable[..., EngineProcess],
    folder: Path,
    main: Callable[[EngineProcess, EngineProcess], Coroutine[Any, Any, None]],
) -> None:
    """Runs `main` with two engines of its own, in the folders `0` and `1`, where it may start others."""
    folders = [folder / "0", folder / "1"]
    for own in folders:
        own.mkdir()
    with start_engine(folders[0]) as first, start_engine(folders[1]) as second:
        first.wait()
        second.wait()
        asyncio.run(main(first, second))


async def until_up(engine: ReplicatedEngine, replica: int, is_up: bool = True) -> None:
    while engine.states[replica].is_up != is_up:
        await asyncio.sleep(0.01)


async def killed(process: EngineProcess, replica: int, *engines: ReplicatedEngine) -> None:
    """Returns once its clients have noticed; another engine may start in its folder then."""
    process.kill()
    for engine in engines:
        await until_up(engine, replica, is_up=False)
    process.stop()


async def tokens(engine: Any, text: str, **options: Any) -> list[int]:
    return (await last_of(engine.generate(text, GREEDY, **options))).outputs[0].token_ids


def test_outputs_are_those_of_one_engine_and_all_replicas_work(
    pair: tuple[str, str], local_engine: AsyncLLMEngine
) -> None:
    async def main() -> None:
        async with replicas(pair, round_robin) as engine:
            found = await asyncio.gather(*(tokens(engine, text) for text in TEXTS))
            assert found == [await tokens(local_engine, text) for text in TEXTS]
            assert [state.num_running + state.num_waiting for state in engine.states] == [0, 0]
            assert [state.kv_usage for state in engine.states] == [0, 0]
            long = await engine.submit("x", SamplingParams(max_tokens=200, ignore_eos=True))
            usages = [engine.states[long.replica].kv_usage async for _ in long]
            assert 0 < usages[0] <= max(usages) < 1
            assert usages[-1] == 0
            with pytest.raises(RequestError, match="logprobs"):
                await engine.submit("x", SamplingParams(logprobs=10_000))
            streams = [await engine.submit(text, GREEDY) for text in TEXTS[:4]]
            assert [stream.replica for stream in streams] in ([0, 1, 0, 1], [1, 0, 1, 0])
            for stream in streams:
                stream.close()
            assert (await engine.list_loras()) == []
            await engine.check_health()

    asyncio.run(main())


class Shadow:
    """What a follower knows of one cache."""

    def __init__(self) -> None:
        self.blocks: set[bytes] = set()

    def follow(self, events: list[CacheEvent]) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                self.blocks |= set(event.block_hashes)
            elif isinstance(event, BlocksRemoved):
                assert self.blocks.issuperset(event.block_hashes), "a block is removed that was never stored"
                self.blocks -= set(event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                self.blocks.clear()


def test_a_follower_knows_exactly_what_the_cache_has(
    pair: tuple[str, str], start_engine: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    """Under random traffic that evicts, and after a reset; hashes computed far away are those of the engine. An
    engine of another config is no replica."""

    async def main(address: str) -> None:
        async with (
            await RemoteEngine.connect(address, 60) as engine,
            await RemoteEngine.connect(address, 60) as other,
        ):
            shadow = Shadow()
            facts = await engine.follow_cache(shadow.follow)
            rng = random.Random(4)
            prompts = [[rng.randrange(5, 90) for _ in range(rng.randrange(1, 40))] for _ in range(60)]
            for start in range(0, len(prompts), 6):
                batch = [{"prompt_token_ids": prompt} for prompt in prompts[start : start + 6]]
                await asyncio.gather(*(last_of(engine.generate(prompt, GREEDY)) for prompt in batch))
            long = [7] * 23
            await last_of(engine.generate({"prompt_token_ids": long}, GREEDY, cache_salt="mine"))
            hashes = facts.block_hashes(long, 4, adapter=None, salt="mine", drafter=None)
            fresh = Shadow()
            await other.follow_cache(fresh.follow)
            await other.call("cache_statistics")
            while not fresh.blocks:
                await asyncio.sleep(0)
            assert shadow.blocks == fresh.blocks
            assert shadow.blocks.issuperset(hashes)
            assert len(hashes) == 5
            await engine.reset_prefix_cache()
            while shadow.blocks:
                await asyncio.sleep(0)
        async with replicas((pair[0], address), round_robin) as both:
            assert [state.is_up for state in both.states] == [True, False]
            assert "replica 1: its scheduler is 'fcfs', and that of the others 'priority'" in both.troubles

    more: dict[str, Any] = {"cache": {"block_size": 4, "num_blocks": 90}, "scheduler": {"name": "fcfs"}}
    with start_engine(tmp_path, **more) as process:
        process.wait()
        asyncio.run(main(process.address))


def test_a_prefix_goes_where_its_blocks_are(pair: tuple[str, str]) -> None:
    """Also for a router that was not there when they were computed."""

    async def main() -> None:
        prompt = {"prompt_token_ids": [11, 22, 33, 44, 55, 66, 77] * 12}
        async with replicas(pair, partial(round_robin)) as engine:
            stream = await engine.submit(prompt, GREEDY)
            had = stream.replica
            await last_of(stream)
        async with replicas(pair, prefix_aware) as engine:
            for _ in range(3):
                stream = await engine.submit(prompt, GREEDY)
                assert stream.replica == had
                assert (await last_of(stream)).num_cached_tokens >= 80

    asyncio.run(main())


def test_adapters_are_loaded_on_all_replicas_or_on_none(
    pair: tuple[str, str], story_model: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        lora = LoRARequest("style", 0, str(save_adapter(tmp_path / "style", story_model, 1)))
        async with replicas(pair, round_robin) as engine:
            await engine.add_lora(lora)
            assert [lora.name for lora in await engine.list_loras()] == ["style"]
            plain = await tokens(engine, TEXTS[0])
            styled = [await tokens(engine, TEXTS[0], lora_request=lora) for _ in range(2)]
            assert styled[0] == styled[1] != plain
            await engine.remove_lora("style")
            broken = LoRARequest("broken", 0, str(tmp_path))
            with pytest.raises(RequestError):
                await engine.add_lora(broken)
            assert await engine.list_loras() == []
            other = LoRARequest("style", 0, str(save_adapter(tmp_path / "other", story_model, 2)))
            async with await RemoteEngine.connect(pair[1], 60) as second:
                await second.add_lora(other)  # behind the others' back
                with pytest.raises(AdapterConflict, match="replica 1: "):
                    await engine.add_lora(lora)
                assert await second.list_loras() == []
            assert await engine.list_loras() == []
            await engine.add_lora(lora)
            await engine.add_lora(LoRARequest("other", 0, other.path))
            async with await RemoteEngine.connect(pair[1], 60) as second:
                await second.pin_lora("other")  # behind the others' back: one of two slots must be left
                with pytest.raises(RequestError, match="replica 1: adapter 'style' cannot be pinned"):
                    await engine.pin_lora("style")
                pinned = [one.is_pinned for one in (*await engine.list_loras(), *await second.list_loras())]
                assert pinned == [False] * 4
            for name in ("style", "other"):
                await engine.remove_lora(name)
            assert [state.is_up for state in engine.states] == [True, True]

    asyncio.run(main())


def test_requests_of_a_replica_that_dies_go_to_another_or_fail_by_name(
    start_engine: Callable[..., EngineProcess], local_engine: AsyncLLMEngine, story_model: Path, tmp_path: Path
) -> None:
    """Those of which something was read fail; the rest move. One that comes back has the weights, the adapters and the
    sleep that came meanwhile. Once all are down, requests are refused at once; of one that comes
    while they die, the replicas that had it are named."""

    async def main(*processes: EngineProcess) -> None:
        addresses = tuple(process.address for process in processes)
        routers: list[Recording] = []

        def create(setup: RouterSetup) -> Router:
            routers.append(Recording(setup))
            return routers[-1]

        async with replicas(addresses, create) as engine:
            begun = await engine.submit("x", replace(GREEDY, extra={"held": "begun"}))
            outputs = aiter(begun)
            await anext(outputs)
            await engine.pause("keep")
            waiting = [await engine.submit(text, GREEDY) for text in TEXTS]
            assert {stream.replica for stream in waiting} == {0, 1}
            lost = begun.replica
            processes[lost].kill()
            with pytest.raises(WorkerError, match=rf"replica {lost} failed .*not retried"):
                async for _ in outputs:
                    pass
            own = [text for text in routers[0].heard if begun.request_id in text or text.startswith("lost")]
            assert own == [f"prefilled {begun.request_id}", f"lost {lost}", f"finished {begun.request_id}"]
            results = [asyncio.ensure_future(last_of(aiter(stream))) for stream in waiting]
            while any(stream.replica == lost for stream in waiting):
                await asyncio.sleep(0)
            assert not engine.states[lost].is_up
            await engine.resume()
            found = [(await result).outputs[0].token_ids for result in results]
            assert found == [await tokens(local_engine, text) for text in TEXTS]
            async with replicas(addresses, round_robin) as later:  # which does not wait for the one that is down
                assert await tokens(later, TEXTS[0]) == found[0]
            await change_all(engine)
            processes[lost].stop()
            with start_engine(tmp_path / str(lost)) as again:
                again.wait()
                await until_up(engine, lost)
                async with await RemoteEngine.connect(again.address, 60) as back:
                    assert (await back.weights()) == (await engine.weights())
                    assert [lora.name for lora in await back.list_loras()] == ["style"]
                    assert await back.is_sleeping()
                await engine.wake_up()
                both = again, processes[1 - lost]
                for process in both:
                    os.kill(process.pid, signal.SIGSTOP)
                coming = asyncio.ensure_future(engine.submit("x", GREEDY))
                while not any(state.num_waiting for state in engine.states):
                    await asyncio.sleep(0)
                for process in both:
                    process.kill()
                with pytest.raises(WorkerError, match=r"replica \d failed while request .* came: .*; then no replica"):
                    await coming
                while engine.is_running:
                    await asyncio.sleep(0.01)
            with pytest.raises(WorkerError, match="none of 2 replicas takes requests: replica 0: its process ended"):
                await engine.submit("x", GREEDY)
            with pytest.raises(WorkerError, match="none of 2 replicas takes requests"):
                await engine.check_health()
            page = (await engine.metrics()).body.decode()
            assert all(f'dovetail:replica_up{{engine="{index}"}} 0\n' in page for index in range(2))

    async def change_all(engine: ReplicatedEngine) -> None:
        await engine.init_weight_transfer_engine()
        assert await engine.start_weight_update(weight_version=7) == 7
        await engine.update_weights({"path": str(story_model)})
        assert (await engine.finish_weight_update()).version == 7
        await engine.add_lora(LoRARequest("style", 0, str(save_adapter(tmp_path / "style", story_model, 1))))
        await engine.sleep(1)

    run_over_two(start_engine, tmp_path, main)


def test_who_misses_a_part_of_an_update_gets_all_of_it_afterwards(
    start_engine: Callable[..., EngineProcess], story_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first replica: silent for a bucket of a partial update, and later another process since the update began. The
    weights of the other are those of both."""
    monkeypatch.setattr(answer_watch, "PATIENCE_S", 0.02)
    monkeypatch.setattr(client_module, "HEALTH_S", 60.0)
    weights = load_file(story_model / "model.safetensors")
    names = sorted(name for name in weights if name.endswith("mlp.down_proj.weight"))
    buckets = []
    for name in names[:2]:
        (tmp_path / name).mkdir()
        save_file({name: 1.5 * weights[name]}, tmp_path / name / "model.safetensors")
        buckets.append({"path": str(tmp_path / name)})

    async def weights_of(process: EngineProcess) -> Any:
        async with await RemoteEngine.connect(process.address, 60) as own:
            return await own.weights()

    async def main(first: EngineProcess, second: EngineProcess) -> None:
        async with replicas((first.address, second.address), round_robin) as engine:
            await engine.init_weight_transfer_engine()
            await engine.start_weight_update(weight_version=3, partial=True)
            client = engine._replicas[0].engine
            async with silent(first, client):
                asked = asyncio.ensure_future(client.weights())  # it notices only where it expects something
                await until_up(engine, 0, is_up=False)
                await engine.update_weights(buckets[0])
            await until_up(engine, 0)
            await asked
            await engine.update_weights(buckets[1])
            report = await engine.finish_weight_update()
            await until_up(engine, 0)
            assert await weights_of(first) == await weights_of(second) == report
            await engine.start_weight_update(weight_version=4)
            await killed(first, 0, engine)
            with start_engine(tmp_path / "0") as again:
                again.wait()
                await until_up(engine, 0)
                await engine.update_weights({"path": str(story_model)})
                report = await engine.finish_weight_update()
                await until_up(engine, 0)
                assert await weights_of(again) == await weights_of(second) == report

    run_over_two(start_engine, tmp_path, main)


def test_a_checkpoint_that_all_read_again_is_read_again_by_one_that_comes_back(
    start_engine: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    """And the router finds the blocks that are computed with it."""
    prompt = {"prompt_token_ids": [11, 22, 33, 44, 55, 66, 77] * 12}

    async def main(first: EngineProcess, second: EngineProcess) -> None:
        async with replicas((first.address, second.address), prefix_aware) as engine:
            await engine.sleep(2)
            await engine.wake_up(new_weights=True)
            assert (await engine.weights()).version == 1
            stream = await engine.submit(prompt, GREEDY)
            has, expected = stream.replica, (await last_of(stream)).outputs[0].token_ids
            busy = await engine.submit(prompt, SamplingParams(max_tokens=100, ignore_eos=True))
            stream = await engine.submit(prompt, GREEDY)
            assert stream.replica == busy.replica == has
            assert (await last_of(stream)).num_cached_tokens >= 80
            await last_of(busy)
            await killed(first, 0, engine)
            with start_engine(tmp_path / "0") as restarted:
                restarted.wait()
                await until_up(engine, 0)
                second.kill()
                assert (await last_of(engine.generate(prompt, GREEDY))).outputs[0].token_ids == expected
                assert (await engine.weights()).version == 1

    run_over_two(start_engine, tmp_path, main)


def test_a_client_knows_of_the_updates_that_another_made(
    start_engine: Callable[..., EngineProcess], story_model: Path, tmp_path: Path
) -> None:
    """As two API processes do. Its router finds blocks of the new weights, and replicas that come back get these from
    it, also where all were gone; where both clients are there, both ask for it."""
    prompt = {"prompt_token_ids": [11, 22, 33, 44, 55, 66, 77] * 12}

    async def main(first: EngineProcess, second: EngineProcess) -> None:
        addresses = first.address, second.address
        async with replicas(addresses, prefix_aware) as engine:
            async with replicas(addresses, round_robin) as other:
                await other.init_weight_transfer_engine()
                await other.start_weight_update(weight_version=5)
                await other.update_weights({"path": str(story_model)})
                report = await other.finish_weight_update()
                stream = await engine.submit(prompt, GREEDY)
                assert await last_of(stream)
                again = await engine.submit(prompt, GREEDY)
                assert again.replica == stream.replica
                assert (await last_of(again)).num_cached_tokens >= 80
                await killed(first, 0, engine, other)
                with start_engine(tmp_path / "0") as restarted:
                    restarted.wait()
                    for client in (engine, other):
                        await until_up(client, 0)
                    async with await RemoteEngine.connect(restarted.address, 60) as own:
                        assert await own.weights() == report
                    second.kill()
            while engine.is_running:
                await asyncio.sleep(0.01)
            with start_engine(tmp_path / "0") as last:
                last.wait()
                await until_up(engine, 0)
                assert await engine.weights() == report

    run_over_two(start_engine, tmp_path, main)


def test_a_replica_is_not_left_in_a_state_that_the_others_left_meanwhile(
    start_engine: Callable[..., EngineProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client, such as that of another API process, resumes them while it is brought to their pause."""

    async def main(first: EngineProcess, second: EngineProcess) -> None:
        async with (
            replicas((first.address, second.address), round_robin) as engine,
            await RemoteEngine.connect(second.address, 60) as other,
        ):
            await engine.pause("keep")

            async def late(of: RemoteEngine, wanted: EngineState) -> str:
                if wanted.is_paused:
                    await other.resume()
                return await bring_to(of, wanted)

            monkeypatch.setattr(fleet_module, "bring_to", late)
            await killed(first, 0, engine)
            with start_engine(tmp_path / "0") as restarted:
                restarted.wait()
                await until_up(engine, 0)
                async with await RemoteEngine.connect(restarted.address, 60) as own:
                    assert not await own.is_paused()

    run_over_two(start_engine, tmp_path, main)


def test_a_replica_that_does_not_answer_gets_no_requests_until_it_does(
    processes: tuple[EngineProcess, EngineProcess],
    pair: tuple[str, str],
    local_engine: AsyncLLMEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests of which nothing was read move meanwhile. What all were asked to do it does before it serves again."""
    monkeypatch.setattr(answer_watch, "PATIENCE_S", 0.02)
    monkeypatch.setattr(client_module, "HEALTH_S", 60.0)

    async def main() -> None:
        async with replicas(pair, round_robin) as engine:
            await engine.pause("keep")
            waiting = [await engine.submit(text, GREEDY) for text in TEXTS]
            assert {stream.replica for stream in waiting} == {0, 1}
            results = [asyncio.ensure_future(last_of(aiter(stream))) for stream in waiting]
            async with silent(processes[0], engine._replicas[0].engine):
                while any(stream.replica == 0 for stream in waiting):
                    await asyncio.sleep(0.01)
                assert [state.is_up for state in engine.states] == [False, True]
                await engine.resume()
                assert not await engine.is_paused()
                found = [(await result).outputs[0].token_ids for result in results]
                assert found == [await tokens(local_engine, text) for text in TEXTS]
            await until_up(engine, 0)
            assert not await engine.is_paused()  # it missed the call, and has caught up

    asyncio.run(main())


def test_a_pause_that_fails_undoes_nothing_that_all_did_meanwhile(
    pair: tuple[str, str], story_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        lora = LoRARequest("style", 0, str(save_adapter(tmp_path / "style", story_model, 1)))
        async with await RemoteEngine.connect(pair[0], 60) as first, replicas(pair, round_robin) as engine:
            goes_on = asyncio.Event()

            async def refuse(mode: str) -> None:
                await goes_on.wait()
                raise RequestError("not now")

            monkeypatch.setattr(engine._replicas[1].engine, "pause", refuse)
            pausing = asyncio.ensure_future(engine.pause("keep"))
            while not await first.is_paused():
                await asyncio.sleep(0)
            await engine.add_lora(lora)
            goes_on.set()
            with pytest.raises(RequestError, match="replica 1: not now"):
                await pausing
            assert [one.name for one in await first.list_loras()] == ["style"]
            assert not await first.is_paused()
            await engine.remove_lora("style")

    asyncio.run(main())


def test_metrics_of_replicas_are_told_apart() -> None:
    page = '# HELP a_total A.\n# TYPE a_total counter\na_total{model="m"} 1\na_total 2\n'
    page += '# TYPE b gauge\nb{engine="9",x="y"} 3\n'
    pages = {index: Exposition(content_type="text/plain", body=page.encode()) for index in (0, 1)}
    troubles = {0: "", 1: 'its weights are "old"', 2: "its process ended, or starts"}
    lines = labelled(pages, troubles).body.decode().splitlines()
    assert lines == [
        "# HELP a_total A.",
        "# TYPE a_total counter",
        'a_total{engine="0",model="m"} 1',
        'a_total{engine="0"} 2',
        'a_total{engine="1",model="m"} 1',
        'a_total{engine="1"} 2',
        "# TYPE b gauge",
        'b{engine="0",x="y"} 3',
        'b{engine="1",x="y"} 3',
        "# HELP dovetail:replica_up 1 while the replica takes requests.",
        "# TYPE dovetail:replica_up gauge",
        'dovetail:replica_up{engine="0"} 1',
        'dovetail:replica_up{engine="1"} 0',
        'dovetail:replica_up{engine="2"} 0',
        "# HELP dovetail:replica_down_reason Why a replica takes no requests.",
        "# TYPE dovetail:replica_down_reason gauge",
        r'dovetail:replica_down_reason{engine="1",reason="its weights are \"old\""} 1',
        'dovetail:replica_down_reason{engine="2",reason="its process ended, or starts"} 1',
    ]
