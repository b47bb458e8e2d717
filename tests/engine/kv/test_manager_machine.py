"""The KV cache manager under any order of calls, against pages whose contents are known.

Between two drains requests are admitted, grown, preempted, swapped and aborted at random, so that every hazard of the
worker's fixed order (swap-outs, swap-ins, copies, forward) comes up; `SimulatedWorker` then checks what each sequence
reads.
"""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dovetail.contracts.kv import KVSpec
from dovetail.contracts.router import BlocksRemoved, BlocksStored, CacheEvent
from dovetail.contracts.sampling import SamplingParams
from dovetail.engine.kv.manager import KVCacheManager
from dovetail.engine.kv.window import first_live_block
from dovetail.engine.sequence import DraftBlocks, Sequence
from dovetail.testing.simulated_worker import Row, SimulatedWorker, states_of
from dovetail.worker.kv_layout import build_layout

SAMPLING = SamplingParams()
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=7)


def holds_blocks(sequence: Sequence) -> bool:
    return bool(sequence.block_ids)


def is_swapped(sequence: Sequence) -> bool:
    return bool(sequence.host_block_ids)


def follow(published: set[bytes], events: list[CacheEvent]) -> None:
    """Applies events to what the cache is said to have; no block comes twice, and none leaves that is not there."""
    for event in events:
        if isinstance(event, BlocksStored):
            assert published.isdisjoint(event.block_hashes)
            assert len(event.token_ids) == len(event.block_hashes) * event.block_size
            published.update(event.block_hashes)
        elif isinstance(event, BlocksRemoved):
            assert published.issuperset(event.block_hashes)
            published.difference_update(event.block_hashes)
        else:
            published.clear()


class ManagerMachine(RuleBasedStateMachine):
    kv: KVCacheManager | None = None

    @initialize(
        windows=st.sampled_from([(None,), (3,), (None, 3), (None, 2, 5)]),
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(6, 20),
        num_host_blocks=st.sampled_from([0, 6, 30]),
        prefix_caching=st.booleans(),
    )
    def create(self, windows, block_size, num_blocks, num_host_blocks, prefix_caching):
        self.layout = build_layout(
            [KVSpec(num_kv_heads=1, head_size=1, dtype="float32", window=window) for window in windows], block_size
        )
        self.kv = KVCacheManager(
            self.layout, num_blocks, num_host_blocks=num_host_blocks, prefix_caching=prefix_caching
        )
        self.worker = SimulatedWorker(self.layout, num_blocks, num_host_blocks)
        self.kv.cache_events.follow()
        self.published: set[bytes] = set()
        self.sequences: list[Sequence] = []
        self.scheduled: dict[int, int] = {}
        self.num_created = 0

    def having(self, where) -> list[Sequence]:
        return [sequence for sequence in self.sequences if where(sequence)]

    @precondition(lambda self: len(self.sequences) < 6)
    @rule(prompt=tokens, salt=st.sampled_from([b"", b"", b"x"]), lookahead=st.sampled_from([0, 0, 3]))
    def arrive(self, prompt: list[int], salt: bytes, lookahead: int):
        self.add(prompt, salt, None, lookahead)

    @precondition(lambda self: len(self.sequences) < 6 and self.having(holds_blocks))
    @rule(data=st.data(), more=tokens)
    def fork(self, data: st.DataObject, more: list[int]):
        parent = data.draw(st.sampled_from(self.having(holds_blocks)))
        cut = data.draw(st.integers(0, len(parent.token_ids)))
        self.attach(self.add(parent.token_ids[:cut] + more, parent.hash_seed, parent))

    def add(self, prompt: list[int], salt: bytes, parent: Sequence | None, lookahead: int = 0) -> Sequence:
        self.num_created += 1
        seq_id = self.num_created
        blocks = DraftBlocks(salt, 0, lookahead) if lookahead else None
        sequence = Sequence(
            seq_id, f"r{seq_id}", prompt, SAMPLING, hash_seed=salt, fork_parent=parent, draft_blocks=blocks
        )
        self.sequences.append(sequence)
        return sequence

    def attach(self, sequence: Sequence):
        expected = self.longest_cached_prefix(sequence)
        num_attached = self.kv.attach_prefix(sequence)
        assert num_attached == sequence.num_computed_tokens < sequence.num_tokens
        assert num_attached == expected or (sequence.fork_parent and num_attached > expected)

    def longest_cached_prefix(self, sequence: Sequence) -> int:
        """By trying every length."""
        size, layout = self.layout.block_size, self.layout
        if not self.kv.prefixes.is_on:
            return 0
        states = states_of(sequence.token_ids, sequence.hash_seed)
        cached = {(group, content) for group, content in self.cached_states()}
        for length in range((sequence.num_tokens - 1) // size, 0, -1):
            if all(
                (group.group_id, states[(index + 1) * size - 1]) in cached
                for group in layout.groups
                for index in range(first_live_block(group, length * size, size), length)
            ):
                return length * size
        return 0

    def cached_states(self):
        """Last state of each page whose content can be found, as the worker has it or will have it."""
        for group_id, found in enumerate(self.kv.pool._found):
            for block in found.values():
                yield group_id, self.worker._device[block][-1][1]

    @precondition(lambda self: self.having(self.can_run))
    @rule(data=st.data(), num_drafts=st.integers(0, 3))
    def run(self, data: st.DataObject, num_drafts: int):
        sequence = data.draw(st.sampled_from(self.having(self.can_run)))
        if not sequence.block_ids:
            self.attach(sequence)
        self.grow(data, sequence, num_drafts)

    @precondition(lambda self: self.having(self.can_run))
    @rule(num_tokens=st.integers(1, 3))
    def run_all(self, num_tokens: int):
        for sequence in self.having(self.can_run):
            if not sequence.block_ids:
                self.attach(sequence)
            count = min(num_tokens, sequence.num_tokens - sequence.num_computed_tokens)
            if self.kv.grant(sequence, count):
                self.scheduled[sequence.seq_id] = count

    def can_run(self, sequence: Sequence) -> bool:
        return not sequence.host_block_ids and sequence.seq_id not in self.scheduled

    def grow(self, data: st.DataObject, sequence: Sequence, num_drafts: int):
        num_known = sequence.num_tokens - sequence.num_computed_tokens
        count = data.draw(st.integers(1, num_known + num_drafts))
        reserve = data.draw(st.sampled_from([0, 0, 2]))
        free = self.kv.num_free_blocks
        before = [table[:] for table in sequence.block_ids]
        if self.kv.grant(sequence, count, reserve):
            assert self.kv.num_free_blocks >= reserve
            self.scheduled[sequence.seq_id] = count
        else:
            assert (self.kv.num_free_blocks, sequence.block_ids) == (free, before)

    def preempt(self, sequence: Sequence):
        self.scheduled.pop(sequence.seq_id, None)
        self.worker.forget(sequence.seq_id)

    @precondition(lambda self: self.having(holds_blocks))
    @rule(data=st.data())
    def release(self, data: st.DataObject):
        sequence = data.draw(st.sampled_from(self.having(holds_blocks)))
        self.kv.release(sequence)
        self.preempt(sequence)

    @precondition(lambda self: self.having(self.can_run) and self.having(holds_blocks))
    @rule(data=st.data(), num_tokens=st.integers(1, 5), reserve=st.integers(0, 20))
    def release_for(self, data: st.DataObject, num_tokens: int, reserve: int):
        """What is missing once others are preempted is known before; less, where a copy falls away with them."""
        sequence = data.draw(st.sampled_from([s for s in self.sequences if s.seq_id not in self.scheduled]))
        others = [other for other in self.having(holds_blocks) if other is not sequence]
        victims = data.draw(st.lists(st.sampled_from(others), unique_by=id)) if others else []
        may_copy = bool(sequence.fork_parent) or bool(self.kv._transfers._copies)
        expected = self.kv.num_missing_blocks(sequence, num_tokens, reserve, victims)
        for victim in victims:
            self.kv.release(victim)
            self.preempt(victim)
        missing = self.kv.num_missing_blocks(sequence, num_tokens, reserve)
        assert missing <= expected if may_copy else missing == expected

    @precondition(lambda self: self.kv.host_pool.num_free and self.having(holds_blocks))
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject):
        sequence = data.draw(st.sampled_from(self.having(holds_blocks)))
        if self.kv.swap_out(sequence):
            assert not sequence.block_ids
            self.preempt(sequence)

    @precondition(lambda self: self.having(holds_blocks))
    @rule(data=st.data())
    def forget_content(self, data: st.DataObject):
        sequence = data.draw(st.sampled_from(self.having(holds_blocks)))
        self.kv.forget_content(sequence)
        again = Sequence(0, "again", sequence.token_ids, SAMPLING, hash_seed=sequence.hash_seed)
        if sequence.num_computed_tokens >= self.layout.block_size:
            assert self.longest_cached_prefix(again) == 0

    @precondition(lambda self: self.having(is_swapped))
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject):
        sequence = data.draw(st.sampled_from(self.having(is_swapped)))
        if self.kv.swap_in(sequence):
            assert not sequence.host_block_ids

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject):
        sequence = data.draw(st.sampled_from(self.sequences))
        self.kv.free(sequence)
        self.preempt(sequence)
        self.sequences.remove(sequence)

    @rule()
    def reset_prefix_cache(self):
        self.kv.reset_prefix_cache()

    @precondition(lambda self: self.scheduled)
    @rule(data=st.data())
    def step(self, data: st.DataObject):
        self.worker.apply(self.kv.drain())
        plan = [
            (sequence, self.scheduled[s.seq_id]) for s in self.sequences if (sequence := s).seq_id in self.scheduled
        ]
        drafts = {s.seq_id: data.draw(st.lists(st.integers(0, 1), min_size=4, max_size=4)) for s, _ in plan}
        rows = []
        for sequence, count in plan:
            if sequence.seq_id not in self.worker.tables:
                self.worker.install(sequence.seq_id, sequence.block_ids)
            start = sequence.num_computed_tokens
            known = [*sequence.token_ids, *drafts[sequence.seq_id]][: start + count]
            rows.append(Row(sequence.seq_id, start, states_of(known, sequence.hash_seed)))
        self.worker.forward(rows)
        for sequence, count in plan:
            self.commit(data, sequence, count, drafts[sequence.seq_id])
        self.scheduled.clear()

    def commit(self, data: st.DataObject, sequence: Sequence, count: int, drafts: list[int]):
        end = sequence.num_computed_tokens + count
        if end < sequence.num_tokens:
            sequence.num_computed_tokens = end
        else:
            num_accepted = data.draw(st.integers(0, end - sequence.num_tokens))
            sequence.token_ids += [*drafts[:num_accepted], data.draw(st.integers(0, 1))]
            sequence.num_tokens += num_accepted + 1
            sequence.num_computed_tokens = sequence.num_tokens - 1
            self.check_slots_ahead(sequence)
        if sequence.num_computed_tokens >= sequence.commit_at:
            self.kv.commit(sequence)
        self.kv.trim(sequence)

    def check_slots_ahead(self, sequence: Sequence):
        """What a drafter writes behind the computed tokens has slots, in pages that nobody can find."""
        end = sequence.num_tokens + sequence.num_lookahead_tokens - 1
        for slot in range(sequence.num_computed_tokens, end):
            for table in sequence.block_ids:
                assert self.kv.pool._hashes[table[slot // self.layout.block_size]] is None

    @invariant()
    def every_reference_has_a_holder(self):
        tables = [table for sequence in self.sequences for table in sequence.block_ids]
        holders = Counter(block for table in tables for block in table if block)
        holders.update(self.kv._transfers._pins)
        assert {block: refs for block, refs in enumerate(self.kv.pool.refs) if refs} == dict(holders)

    @invariant()
    def tables_of_a_sequence_are_equally_long_and_hold_what_it_sees(self):
        size = self.layout.block_size
        for sequence in self.sequences:
            for group, table in zip(self.layout.groups, sequence.block_ids, strict=False):
                assert len(table) == len(sequence.block_ids[0])
                computed = sequence.num_computed_tokens
                seen = table[first_live_block(group, computed, size) : self.layout.blocks_for(computed)]
                assert 0 not in seen
                assert len(set(filter(None, table))) == len(table) - table.count(0)

    @invariant()
    def content_is_under_way_only_where_a_step_computes_it(self):
        assert set(self.kv.prefixes._under_way._contents) <= set(self.scheduled)
        if not self.scheduled:
            assert len(self.kv.prefixes._under_way) == 0

    @invariant()
    def what_is_to_be_told_is_announced(self):
        kv, moves = self.kv, self.kv._transfers
        moved = [moves._copies, moves._swap_ins, moves._swap_outs, moves._pins, moves._read_host_blocks]
        if any([kv._new_blocks, kv._unsent, kv._given_up, *moved]):
            assert kv.has_changes

    @invariant()
    def events_say_what_is_found(self):
        events = self.kv.cache_events
        follow(self.published, events.take())
        assert self.published == set(self.kv.pool._found[events.group_id])

    @invariant()
    def host_blocks_have_one_holder(self):
        tables = [table for sequence in self.sequences for table in sequence.host_block_ids]
        held = [block for table in tables for block in table if block >= 0]
        waiting = self.kv._transfers._read_host_blocks
        pool = self.kv.host_pool
        assert sorted([*held, *waiting, *pool._free]) == list(range(pool.num_blocks))

    def teardown(self):
        if self.kv is None:
            return
        for sequence in self.sequences:
            self.kv.free(sequence)
        self.kv.drain()
        assert self.kv.num_free_blocks == self.kv.num_blocks - 1
        assert self.kv.host_pool.num_free == self.kv.host_pool.num_blocks


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=250, stateful_step_count=60, deadline=None)
