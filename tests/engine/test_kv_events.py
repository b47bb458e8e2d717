"""KV events of an engine, against what its prefix cache has."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from hashlib import blake2b

from dovetail import LLM, SamplingParams
from dovetail.contracts.router import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    ReplicaState,
    RoutedRequest,
    RouterSetup,
    report_event,
)
from dovetail.contracts.telemetry import FollowsCache
from dovetail.engine.engine import LLMEngine
from dovetail.plugins.routers.prefix_aware import PrefixAware, PrefixAwareOptions

MakeLLM = Callable[..., LLM]


class Follower:
    """What the cache is said to have. Events are of consecutive blocks, and no block comes or leaves twice."""

    def __init__(self) -> None:
        self.blocks: set[bytes] = set()
        self.events: list[CacheEvent] = []

    def __call__(self, events: Sequence[CacheEvent]) -> None:
        self.events += events
        for event in events:
            if isinstance(event, BlocksStored):
                assert self.blocks.isdisjoint(event.block_hashes)
                self.blocks.update(event.block_hashes)
            elif isinstance(event, BlocksRemoved):
                assert self.blocks.issuperset(event.block_hashes)
                self.blocks.difference_update(event.block_hashes)
            else:
                self.blocks.clear()


def cached(engine: LLMEngine) -> set[bytes]:
    return set(engine.tokens._parts.kv.pool._found[0])


def test_events_of_random_traffic_say_what_the_cache_has(make_llm: MakeLLM) -> None:
    engine = make_llm(cache={"num_blocks": 40}, model={"max_model_len": 64}).engine
    follower, draws = Follower(), random.Random(5)
    router = PrefixAware(PrefixAwareOptions(request_cost=0), RouterSetup(num_replicas=2, block_size=4))
    stop = engine.on_kv_events(follower)
    engine.on_kv_events(lambda events: [report_event(router, 1, event) for event in events])
    starts = [[draws.randrange(3, 120) for _ in range(24)] for _ in range(4)]
    for number in range(60):
        prompt = [*draws.choice(starts)[: draws.randrange(1, 25)], draws.randrange(3, 120)]
        params = SamplingParams(max_tokens=draws.randrange(1, 12), ignore_eos=True)
        engine.add_request(f"r{number}", engine.process_input({"prompt_token_ids": prompt}, params))
        for _ in range(draws.randrange(4)):
            engine.step()
            assert follower.blocks == cached(engine)
        if draws.random() < 0.2 and engine.request_ids:
            engine.abort_request(draws.choice(engine.request_ids))
        if number == 30:
            engine.reset_prefix_cache()
            assert follower.blocks == cached(engine) == set()
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.cache_statistics().num_evictions > 0
    assert follower.blocks == cached(engine)
    check_hashes(follower.events)
    check_router(router, cached(engine), follower.events)
    late = Follower()
    engine.on_kv_events(late)
    assert late.blocks == follower.blocks
    stop()
    engine.reset_prefix_cache()
    assert (len(late.blocks), len(follower.blocks) > 0) == (0, True)


def check_hashes(events: Sequence[CacheEvent]) -> None:
    """A block's hash is that of its tokens behind its parent."""
    for event in events:
        if not isinstance(event, BlocksStored):
            continue
        parent = event.parent_hash
        for index, content in enumerate(event.block_hashes):
            tokens = b"".join(t.to_bytes(4, "little") for t in event.token_ids[index * 4 : index * 4 + 4])
            assert parent is None or blake2b(parent + tokens, digest_size=32).digest() == content
            parent = content


def check_router(router: PrefixAware, blocks: set[bytes], events: Sequence[CacheEvent]) -> None:
    """The engine is chosen, as replica 1, where it has the prompt's first block, and otherwise the lower index."""
    replicas = [ReplicaState(index=0, name="a"), ReplicaState(index=1, name="b")]
    firsts = {event.block_hashes[0] for event in events if isinstance(event, BlocksStored)}
    assert firsts & blocks
    assert firsts - blocks
    for number, first in enumerate(sorted(firsts)):
        request = RoutedRequest(
            request_id=f"q{number}", num_prompt_tokens=5, max_tokens=1, block_size=4, block_hashes=(first,)
        )
        assert router.choose(request, replicas) == (1 if first in blocks else 0)
        router.finished(request.request_id)


def test_a_cache_that_is_lost_is_published_as_cleared(make_llm: MakeLLM) -> None:
    engine = make_llm().engine
    follower = Follower()

    class Sink(FollowsCache):
        def on_kv_events(self, events: Sequence[CacheEvent]) -> None:
            follower(events)

    engine.add_telemetry_sink(Sink(Sink.Options()))

    def compute() -> None:
        prompt = {"prompt_token_ids": list(range(3, 30))}
        engine.add_request("r", engine.process_input(prompt, SamplingParams(max_tokens=2, ignore_eos=True)))
        while engine.has_unfinished_requests():
            engine.step()
        assert follower.blocks == cached(engine) != set()

    compute()
    engine.initialize_cache(100)
    assert follower.blocks == set()
    compute()
    engine.sleep(1)
    assert follower.blocks == set()
    engine.wake_up()
    compute()
    engine.sleep(2)
    engine.wake_up(new_weights=True)
    assert follower.blocks == cached(engine) == set()
    assert isinstance(follower.events[-1], AllBlocksCleared)
    compute()


def test_a_listener_that_raises_is_heard_of_once(make_llm: MakeLLM, caplog: object) -> None:
    llm = make_llm()
    calls = []

    def broken(events: Sequence[CacheEvent]) -> None:
        calls.append(events)
        raise RuntimeError("no luck")

    llm.engine.on_kv_events(broken)
    llm.generate({"prompt_token_ids": list(range(3, 30))}, SamplingParams(max_tokens=2), use_tqdm=False)
    assert len(calls) == 1
