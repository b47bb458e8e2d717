"""The block pool against a plain model of itself."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dovetail.contracts.errors import CapacityError
from dovetail.engine.kv.pool import BlockPool, PoolUsage, PrefixCacheReset

NUM_BLOCKS = 7
contents = st.integers(0, 9).map(lambda i: bytes([i]))


class PoolMachine(RuleBasedStateMachine):
    """The model keeps holders, contents and the time of the last free, and looks through all of them."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, 2)
        self.refs = dict.fromkeys(range(1, NUM_BLOCKS), 0)
        self.content: dict[int, tuple[int, bytes]] = {}
        self.freed: dict[int, int] = {}
        self.clock = 0

    def held(self) -> list[int]:
        return [block for block, refs in self.refs.items() if refs]

    def free_blocks(self) -> list[int]:
        return [block for block, refs in self.refs.items() if not refs]

    @rule(count=st.integers(1, 3))
    def take(self, count: int):
        if count > self.pool.num_free:
            return
        for block in self.pool.take(count):
            assert self.refs[block] == 0
            if block in self.content:
                free = self.free_blocks()
                assert all(other in self.content for other in free), "an empty block was passed over"
                assert self.freed[block] == min(self.freed[other] for other in free)
                del self.content[block]
            self.refs[block] = 1

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def free(self, data: st.DataObject):
        blocks = data.draw(st.lists(st.sampled_from(self.held()), unique=True, min_size=1))
        self.pool.free(blocks)
        for block in blocks:
            self.refs[block] -= 1
            if not self.refs[block]:
                self.clock += 1
                self.freed[block] = self.clock

    @precondition(lambda self: self.held() or self.content)
    @rule(data=st.data())
    def share(self, data: st.DataObject):
        block = data.draw(st.sampled_from(sorted({*self.held(), *self.content})))
        self.pool.share(block)
        self.refs[block] += 1

    @precondition(lambda self: self.held())
    @rule(data=st.data(), group=st.integers(0, 1), content=contents)
    def register(self, data: st.DataObject, group: int, content: bytes):
        block = data.draw(st.sampled_from(self.held()))
        self.pool.register(block, group, content)
        if block not in self.content and (group, content) not in self.content.values():
            self.content[block] = (group, content)

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def unregister(self, data: st.DataObject):
        block = data.draw(st.sampled_from(self.held()))
        self.pool.unregister(block)
        self.content.pop(block, None)

    @rule()
    def reset(self):
        in_use = sum(self.refs[block] > 0 for block in self.content)
        expected = PrefixCacheReset(len(self.content) - in_use, in_use)
        assert self.pool.reset_prefix_cache() == expected
        self.content.clear()

    @rule(group=st.integers(0, 1), content=contents)
    def find(self, group: int, content: bytes):
        found = [block for block, named in self.content.items() if named == (group, content)]
        assert self.pool.find(group, content) == (found[0] if found else 0)

    @invariant()
    def counts_agree(self):
        assert self.pool.refs[1:] == [self.refs[block] for block in range(1, NUM_BLOCKS)]
        free = self.free_blocks()
        num_cached = sum(block in self.content for block in free)
        assert self.pool.num_free == len(free)
        assert self.pool.usage() == PoolUsage(NUM_BLOCKS - 1 - len(free), num_cached, len(free) - num_cached)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_null_block_is_never_handed_out():
    assert sorted(BlockPool(8, 1).take(7)) == list(range(1, 8))


def test_tail_is_evicted_before_its_parents():
    pool = BlockPool(4, 1)
    blocks = pool.take(3)
    for block in blocks:
        pool.register(block, 0, bytes([block]))
    pool.free(reversed(blocks))
    assert [pool.take(1)[0] for _ in blocks] == blocks[::-1]
    assert pool.num_evictions == 3


def test_pool_without_a_usable_block_is_refused():
    with pytest.raises(CapacityError, match="at least 2"):
        BlockPool(1, 1)
