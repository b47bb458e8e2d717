"""What the bundled routers choose."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.router import ReplicaState, RoutedRequest, Router, RouterSetup
from dovetail.plugins.routers.block_index import BlockIndex
from dovetail.plugins.routers.least_tokens import LeastTokens
from dovetail.plugins.routers.prefix_aware import PrefixAware, PrefixAwareOptions
from dovetail.plugins.routers.round_robin import RoundRobin

SIZE = 16
REPLICAS = 4
A, B, C, D = (b"a", b"b", b"c", b"d")


def create(plugin: type[Router], options: PluginOptions | None = None) -> Router:
    return plugin(options or plugin.Options(), RouterSetup(num_replicas=REPLICAS, block_size=SIZE))


def states(*down: int) -> list[ReplicaState]:
    return [ReplicaState(index=index, name=str(index), is_up=index not in down) for index in range(REPLICAS)]


def request(name: str, tokens: int = SIZE, blocks: tuple[bytes, ...] = (), max_tokens: int = 100) -> RoutedRequest:
    return RoutedRequest(
        request_id=name, num_prompt_tokens=tokens, max_tokens=max_tokens, block_size=SIZE, block_hashes=blocks
    )


def test_round_robin_passes_over_replicas_that_are_down():
    router = create(RoundRobin)
    assert [router.choose(request(str(n)), states(1)) for n in range(5)] == [0, 2, 3, 0, 2]


def test_least_tokens_counts_prompts_until_they_are_computed_and_outputs_until_they_end():
    router = create(LeastTokens)
    prompts = {"a": 90, "b": 40, "c": 10, "d": 20}
    assert [router.choose(request(name, tokens), states()) for name, tokens in prompts.items()] == [0, 1, 2, 3]
    assert router.choose(request("e", 200), states()) == 2  # 10 + 100 tokens, fewer than the others
    router.prefilled("a")
    assert router.choose(request("f", 30), states()) == 0  # 100 tokens of output are left
    router.finished("d")
    assert router.choose(request("g"), states()) == 3


def test_prefix_aware_goes_to_the_longest_run_where_all_are_idle():
    router = create(PrefixAware)
    router.blocks_stored(1, (A, B))
    router.blocks_stored(2, (A, B, C))
    router.blocks_stored(3, (B, C, D))  # of no use without A
    assert router.choose(request("x", 4 * SIZE, (A, B, C, D)), states()) == 2


def test_prefix_aware_leaves_a_cached_prefix_where_computing_it_again_is_sooner():
    router = create(PrefixAware, PrefixAwareOptions(request_cost=0))
    router.blocks_stored(2, (A,))
    long = request("long", 3 * SIZE + 1, (A, b"other", b"more"))
    assert router.choose(long, states()) == 2
    assert router.choose(request("x", 2 * SIZE, (A, B)), states()) == 0
    router.prefilled("long")
    assert router.choose(request("y", 2 * SIZE, (A, b"y")), states()) == 2


def test_prefix_aware_counts_prompts_that_are_being_computed():
    router = create(PrefixAware, PrefixAwareOptions(request_cost=0))
    blocks = (A, B, C, D)
    assert router.choose(request("first", 4 * SIZE + 1, blocks), states()) == 0
    # 65 tokens are under way at replica 0 and would have to be waited for; elsewhere 65 would be computed again.
    assert router.choose(request("twin", 4 * SIZE + 1, blocks), states()) == 1
    router.finished("first")
    router.finished("twin")
    # Both ended without a stored block: nobody has anything.
    assert router.choose(request("later", 4 * SIZE + 1, blocks), states()) == 0


def test_prefix_aware_forgets_blocks_of_a_replica_that_was_lost_cleared_or_evicted_them():
    router = create(PrefixAware)
    for replica in (1, 2, 3):
        router.blocks_stored(replica, (A, B, C)[: 4 - replica])
    prompt = (A, B, C)
    assert router.choose(request("1", 4 * SIZE, prompt), states()) == 1
    router.finished("1")
    router.blocks_removed(1, (B,))
    assert router.choose(request("2", 4 * SIZE, prompt), states()) == 2
    router.finished("2")
    router.replica_lost(2)
    assert router.choose(request("3", 4 * SIZE, prompt), states(2)) == 1
    router.finished("3")
    router.all_blocks_cleared(1)
    assert router.choose(request("4", 4 * SIZE, prompt), states(2)) == 3


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["store", "remove", "clear", "expect", "unexpect"]),
        st.integers(0, REPLICAS - 1),
        st.lists(st.sampled_from([A, B, C, D]), max_size=4),
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(EVENTS, st.permutations([A, B, C, D]))
def test_the_index_is_a_search_over_what_each_replica_has(events, prompt):
    index = BlockIndex()
    stored = [set() for _ in range(REPLICAS)]
    expected = [[] for _ in range(REPLICAS)]
    for kind, replica, blocks in events:
        if kind == "store":
            index.store(replica, blocks)
            stored[replica].update(blocks)
        elif kind == "remove":
            index.remove(replica, blocks)
            stored[replica].difference_update(blocks)
        elif kind == "clear":
            index.clear(replica)
            stored[replica].clear()
        elif kind == "expect":
            index.expect(replica, blocks)
            expected[replica].append(blocks)
        elif expected[replica]:
            index.expect_no_longer(replica, expected[replica].pop())
    have = [stored[replica].union(*expected[replica]) for replica in range(REPLICAS)]
    runs = [next((n for n, block in enumerate(prompt) if block not in mine), len(prompt)) for mine in have]
    assert index.runs(prompt) == {replica: run for replica, run in enumerate(runs) if run}
    assert len(index) == len(set().union(*have))


@pytest.mark.parametrize("cost", [0, 50])
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_prefix_aware_chooses_the_replica_with_the_least_left_to_compute(cost, data):
    """Compared with a search over all replicas, by the formula of its docstring."""
    router = create(PrefixAware, PrefixAwareOptions(request_cost=cost))
    stored = [set() for _ in range(REPLICAS)]
    left: dict[str, tuple[int, int, tuple[bytes, ...]]] = {}
    for number in range(data.draw(st.integers(1, 12))):
        replica, blocks = data.draw(st.integers(0, REPLICAS - 1)), tuple(data.draw(st.permutations([A, B, C, D])))
        if data.draw(st.booleans()):
            router.blocks_stored(replica, blocks[:2])
            stored[replica].update(blocks[:2])
        tokens = len(blocks) * SIZE + data.draw(st.integers(0, 40))
        usable = blocks[: (tokens - 1) // SIZE]
        costs = []
        for one in range(REPLICAS):
            mine = [entry for entry in left.values() if entry[0] == one]
            have = stored[one].union(*(entry[2] for entry in mine))
            run = next((n for n, block in enumerate(usable) if block not in have), len(usable))
            load = sum(entry[1] for entry in mine) + cost * len(mine)
            costs.append((tokens - run * SIZE + load, len(mine), one, run))
        best = min(costs)
        chosen = router.choose(request(str(number), tokens, blocks), states())
        assert chosen == best[2]
        left[str(number)] = (chosen, tokens - best[3] * SIZE, blocks[best[3] :])
