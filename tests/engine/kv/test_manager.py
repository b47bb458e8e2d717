"""The KV cache manager, one behaviour at a time. Orders of calls at random are in test_manager_machine.py."""

from dataclasses import fields, replace

import pytest

from dovetail.contracts.kv import KVSpec
from dovetail.contracts.sampling import SamplingParams
from dovetail.engine.kv.hashing import PagesIdentity, prefix_seed
from dovetail.engine.kv.manager import KVCacheManager
from dovetail.engine.kv.pool import PrefixCacheReset
from dovetail.engine.sequence import Sequence
from dovetail.testing.simulated_worker import Row, SimulatedWorker, states_of
from dovetail.worker.kv_layout import build_layout


class Engine:
    """Computes sequences without a scheduler: blocks of 4 tokens."""

    def __init__(self, *windows: int | None, num_blocks: int = 20, num_host_blocks: int = 0):
        layout = build_layout(
            [KVSpec(num_kv_heads=1, head_size=1, dtype="float32", window=window) for window in windows or (None,)], 4
        )
        self.kv = KVCacheManager(layout, num_blocks, num_host_blocks=num_host_blocks)
        self.worker = SimulatedWorker(layout, num_blocks, num_host_blocks)
        self.num_created = 0

    def sequence(self, tokens: list[int], parent: Sequence | None = None, salt: bytes = b"") -> Sequence:
        self.num_created += 1
        seq_id = self.num_created
        return Sequence(seq_id, f"r{seq_id}", tokens, SamplingParams(), fork_parent=parent, hash_seed=salt)

    def compute(self, *sequences: Sequence) -> None:
        """All known tokens but the last, in one step; the pages are checked."""
        for sequence in sequences:
            num_tokens = sequence.num_tokens - 1 - sequence.num_computed_tokens
            assert self.kv.grant(sequence, num_tokens) == num_tokens
        self.forward(*sequences)

    def forward(self, *sequences: Sequence) -> None:
        self.worker.apply(self.kv.drain())
        rows = []
        for sequence in sequences:
            if sequence.seq_id not in self.worker.tables:
                self.worker.install(sequence.seq_id, sequence.block_ids)
            states = states_of(sequence.token_ids[:-1], sequence.hash_seed)
            rows.append(Row(sequence.seq_id, sequence.num_computed_tokens, states))
        self.worker.forward(rows)
        for sequence in sequences:
            sequence.num_computed_tokens = sequence.num_tokens - 1
            self.kv.commit(sequence)

    def computed(self, tokens: list[int], salt: bytes = b"") -> Sequence:
        sequence = self.sequence(tokens, salt=salt)
        self.kv.attach_prefix(sequence)
        self.compute(sequence)
        return sequence


def append(sequence: Sequence, *tokens: int) -> None:
    sequence.token_ids += tokens
    sequence.num_tokens += len(tokens)


def test_full_blocks_of_a_finished_request_are_found():
    engine = Engine()
    engine.kv.free(engine.computed(list(range(12))))
    again = engine.sequence(list(range(12)))
    assert engine.kv.attach_prefix(again) == 8
    engine.compute(again)


def test_whole_prompt_in_the_cache_leaves_a_token_to_compute():
    engine = Engine()
    engine.computed(list(range(9)))
    assert engine.kv.attach_prefix(engine.sequence(list(range(8)))) == 4


def test_blocks_are_not_found_before_they_are_computed():
    engine = Engine()
    first = engine.sequence(list(range(9)))
    engine.kv.attach_prefix(first)
    assert engine.kv.grant(first, 9)
    assert engine.kv.attach_prefix(engine.sequence(list(range(9)))) == 0


def test_a_prefix_that_another_request_computes_is_awaited():
    engine = Engine()
    first, second = engine.sequence(list(range(13))), engine.sequence([*range(8), 90, 91])
    engine.kv.attach_prefix(first)
    assert not engine.kv.awaits_prefix(second)
    assert engine.kv.grant(first, 12)
    assert engine.kv.awaits_prefix(second)
    engine.forward(first)
    assert not engine.kv.awaits_prefix(second)
    assert engine.kv.attach_prefix(second) == 8


def test_a_prefix_is_not_awaited_from_a_request_that_gave_way():
    engine = Engine()
    first, second = engine.sequence(list(range(9))), engine.sequence(list(range(9)))
    engine.kv.attach_prefix(first)
    assert engine.kv.grant(first, 8)
    engine.kv.release(first)
    assert not engine.kv.awaits_prefix(second)


@pytest.mark.parametrize(
    ("tokens", "salt"), [([0, 1, 2, 90, 4, 5], b""), ([0, 1, 2, 3], b""), (list(range(9)), b"other")]
)
def test_only_a_whole_block_of_the_same_content_is_awaited(tokens: list[int], salt: bytes):
    engine = Engine()
    first = engine.sequence(list(range(9)))
    engine.kv.attach_prefix(first)
    assert engine.kv.grant(first, 8)
    assert not engine.kv.awaits_prefix(engine.sequence(tokens, salt=salt))


def test_nothing_is_awaited_once_the_cache_is_reset():
    engine = Engine()
    first = engine.sequence(list(range(9)))
    engine.kv.attach_prefix(first)
    assert engine.kv.grant(first, 8)
    engine.kv.reset_prefix_cache()
    assert not engine.kv.awaits_prefix(engine.sequence(list(range(9))))


def test_salts_keep_prefixes_apart():
    engine = Engine()
    engine.computed(list(range(9)), salt=b"a")
    assert engine.kv.attach_prefix(engine.sequence(list(range(9)), salt=b"b")) == 0
    assert engine.kv.attach_prefix(engine.sequence(list(range(9)), salt=b"a")) == 8


def test_a_seed_equal_to_a_digest_does_not_continue_a_chain():
    engine = Engine()
    first = engine.computed(list(range(9)))
    stranger = engine.sequence(list(range(4, 9)), salt=first.block_hashes[0])
    assert engine.kv.attach_prefix(stranger) == 0


def test_windows_need_only_the_blocks_inside_them():
    engine = Engine(None, 4)
    engine.kv.free(engine.computed(list(range(17))))
    again = engine.sequence(list(range(17)))
    assert engine.kv.attach_prefix(again) == 16
    assert [block == 0 for block in again.block_ids[1]] == [True, True, True, False]
    engine.compute(again)


def test_window_blocks_are_freed_and_told():
    engine = Engine(4)
    sequence = engine.computed(list(range(17)))
    assert [block == 0 for block in sequence.block_ids[0]] == [True, True, True, False]
    assert engine.kv.drain().new_blocks == [(sequence.seq_id, 0, 0, [0, 0, 0])]
    assert engine.kv.statistics().num_used_blocks == 1


@pytest.mark.parametrize("windows", [(None,), (None, 3)])
def test_fork_copies_the_partly_filled_block_before_it_writes(windows: tuple[int | None, ...]):
    engine = Engine(*windows)
    parent = engine.computed([1] * 7)
    fork = engine.sequence([1] * 7, parent)
    assert engine.kv.attach_prefix(fork) == 6
    assert fork.block_ids == parent.block_ids
    append(parent, 2)
    append(fork, 3)
    engine.compute(parent, fork)
    assert engine.kv.statistics().num_copied_blocks == len(windows)
    assert fork.block_ids[0][0] == parent.block_ids[0][0]
    assert fork.block_ids[0][1] != parent.block_ids[0][1]


def test_parent_that_is_written_first_goes_on_in_place():
    engine = Engine()
    parent = engine.computed([1] * 7)
    before = [table[:] for table in parent.block_ids]
    fork = engine.sequence([1] * 7, parent)
    engine.kv.attach_prefix(fork)
    append(parent, 2)
    engine.compute(parent)
    assert parent.block_ids == before
    append(fork, 3)
    engine.compute(fork)


def test_fork_of_other_tokens_shares_up_to_where_they_part():
    engine = Engine()
    parent = engine.computed([1, 1, 1, 1, 1, 1, 2, 2, 2])
    fork = engine.sequence([1, 1, 1, 1, 1, 1, 3, 3], parent)
    assert engine.kv.attach_prefix(fork) == 6
    engine.compute(fork)


def test_block_that_a_fork_overwrites_is_no_longer_found():
    engine = Engine()
    parent = engine.computed([1] * 9)
    fork = engine.sequence([1, 1, 1, 1, 1, 1, 3, 3, 3], parent)
    assert engine.kv.attach_prefix(fork) == 6
    engine.kv.free(parent)
    engine.compute(fork)
    again = engine.sequence([1] * 9)
    assert engine.kv.attach_prefix(again) == 4
    engine.compute(again)


def test_copy_into_a_block_that_is_given_up_is_not_made():
    engine = Engine(num_host_blocks=4)
    swapped = engine.computed([5] * 4)
    parent = engine.computed([1] * 3)
    assert engine.kv.swap_out(swapped)
    engine.forward()
    fork = engine.sequence([1] * 3, parent)
    engine.kv.attach_prefix(fork)
    assert engine.kv.grant(fork, 1)
    copied = fork.block_ids[0][0]
    engine.kv.release(fork)
    assert engine.kv.swap_in(swapped)
    assert swapped.block_ids[0] == [copied], "the test needs the block to be reused"
    append(swapped, 6)
    engine.compute(swapped)


def test_host_block_is_not_reused_before_it_was_read():
    engine = Engine(num_host_blocks=1)
    first, second = engine.computed([1] * 3), engine.computed([2] * 3)
    assert engine.kv.swap_out(first)
    engine.forward()
    assert engine.kv.swap_in(first)
    assert not engine.kv.swap_out(second)
    append(first, 3)
    engine.compute(first)
    assert engine.kv.swap_out(second)


def test_block_that_waits_for_its_content_is_not_swapped_out():
    engine = Engine(num_host_blocks=4)
    sequence = engine.computed([1] * 3)
    assert engine.kv.swap_out(sequence)
    engine.forward()
    assert engine.kv.swap_in(sequence)
    assert not engine.kv.swap_out(sequence)


def test_swap_in_of_a_request_that_is_given_up_is_not_made():
    engine = Engine(num_host_blocks=4)
    sequence = engine.computed([1] * 3)
    assert engine.kv.swap_out(sequence)
    engine.forward()
    assert engine.kv.swap_in(sequence)
    engine.kv.release(sequence)
    assert engine.kv.drain().swap_in == []
    assert engine.kv.statistics().num_used_host_blocks == 0


def test_swap_round_trip_within_one_plan():
    engine = Engine(num_host_blocks=4)
    sequence = engine.computed([1] * 7)
    assert engine.kv.swap_out(sequence)
    assert engine.kv.swap_in(sequence)
    engine.worker.forget(sequence.seq_id)
    append(sequence, 2)
    engine.compute(sequence)


def test_swapping_in_shares_what_is_still_on_the_device():
    engine = Engine(num_host_blocks=8)
    first, second = engine.computed([1] * 10), engine.computed([1] * 10)
    assert engine.kv.swap_out(second)
    engine.forward()
    assert engine.kv.swap_in(second)
    assert second.block_ids[0][:2] == first.block_ids[0][:2]
    assert len(engine.kv.drain().swap_in) == 1


def test_freeing_a_swapped_sequence_frees_the_host():
    engine = Engine(num_host_blocks=4)
    sequence = engine.computed([1] * 7)
    assert engine.kv.swap_out(sequence)
    assert engine.kv.statistics().num_used_host_blocks == 2
    engine.kv.free(sequence)
    assert engine.kv.statistics().num_used_host_blocks == 0
    assert engine.kv.drain().swap_out == []


def test_trim_returns_the_blocks_of_rejected_drafts():
    engine = Engine()
    sequence = engine.computed([1] * 4)
    assert engine.kv.grant(sequence, 10)
    assert len(sequence.block_ids[0]) == 4
    engine.kv.trim(sequence)
    assert len(sequence.block_ids[0]) == 1
    append(sequence, 1)
    engine.compute(sequence)


def test_reset_says_what_it_did():
    engine = Engine()
    running = engine.computed([1] * 9)
    engine.kv.free(engine.computed([2] * 13))
    assert engine.kv.reset_prefix_cache() == PrefixCacheReset(num_dropped=3, num_in_use=2)
    assert engine.kv.attach_prefix(engine.sequence([1] * 9)) == 0
    append(running, 1, 1, 1, 1)
    engine.compute(running)
    assert engine.kv.statistics().num_cached_blocks == 0


def test_statistics_count_admitted_requests_once():
    engine = Engine(num_blocks=5)
    running = engine.computed([1] * 9)
    waiting = engine.sequence([1] * 8 + [2] * 8)
    for _ in range(3):
        assert engine.kv.attach_prefix(waiting) == 8
        assert not engine.kv.grant(waiting, 8, reserve=1)
        engine.kv.release(waiting)
    engine.kv.free(running)
    engine.kv.attach_prefix(waiting)
    assert engine.kv.grant(waiting, 8)
    statistics = engine.kv.statistics()
    assert (statistics.prefix_query_tokens, statistics.prefix_hit_tokens) == (9 + 16, 8)
    assert (statistics.num_blocks, statistics.num_used_blocks) == (4, 4)
    assert waiting.num_cached_tokens == 8


def test_refused_allocation_changes_nothing():
    engine = Engine(num_blocks=3)
    sequence = engine.sequence([1] * 12)
    assert not engine.kv.grant(sequence, 12)
    assert sequence.block_ids == []
    assert engine.kv.num_free_blocks == 2


def test_commit_says_when_it_is_needed_next():
    engine = Engine(None, 6)
    sequence = engine.computed([1] * 7)
    assert sequence.commit_at == 8
    append(sequence, 1, 1)
    engine.compute(sequence)
    assert sequence.commit_at == 9


def test_wrong_order_of_calls_is_refused():
    engine = Engine()
    sequence = engine.computed([1] * 7)
    with pytest.raises(ValueError, match="holds blocks already"):
        engine.kv.attach_prefix(sequence)
    with pytest.raises(ValueError, match="not swapped out"):
        engine.kv.swap_in(sequence)


def test_drain_names_who_gave_its_blocks_up():
    engine = Engine(num_host_blocks=8)
    released, swapped, ended, fresh = (engine.sequence([token] * 7) for token in range(1, 5))
    engine.compute(released, swapped, ended)
    engine.kv.release(released)
    engine.kv.attach_prefix(released)  # it is back already, on other blocks
    assert engine.kv.swap_out(swapped)
    engine.kv.free(ended)
    engine.kv.grant(fresh, 6)
    engine.kv.release(fresh)  # no worker ever heard of it
    assert engine.kv.drain().given_up == [released.seq_id, swapped.seq_id]
    assert engine.kv.drain().given_up == []


PAGES = PagesIdentity(
    weights=(("model.safetensors", 100, 1),),
    weight_version=0,
    weight_checksum="",
    plugins="ab",
    dtype="float32",
    adapter_dtype="",
    kv_dtype="float32",
    layout=build_layout([KVSpec(num_kv_heads=1, head_size=1, dtype="float32")], 4),
    tensor_parallel=1,
)
OTHERS = {
    "weights": (("model.safetensors", 100, 2),),
    "weight_version": 1,
    "weight_checksum": "0f",
    "plugins": "cd",
    "dtype": "bfloat16",
    "adapter_dtype": "bfloat16",
    "kv_dtype": "float16",
    "layout": build_layout([KVSpec(num_kv_heads=1, head_size=1, dtype="float32")], 8),
    "tensor_parallel": 2,
    "stage_layers": (1, 1),
}


def test_only_equal_pages_adapters_and_salts_share_blocks():
    assert OTHERS.keys() == {field.name for field in fields(PagesIdentity)}
    identities = [PAGES, *(replace(PAGES, **{name: other}) for name, other in OTHERS.items())]
    seeds = [
        prefix_seed(pages, adapter, salt)
        for pages in identities
        for adapter in (None, "None", "a")
        for salt in (None, "None", "a")
    ]
    assert len(set(seeds)) == len(seeds) == len(identities) * 9
    assert prefix_seed(replace(PAGES), None, "a") == prefix_seed(PAGES, None, "a")


@pytest.mark.parametrize("windows", [(None,), (None, 3), (3,)])
def test_forgotten_content_is_found_by_nobody(windows: tuple[int | None, ...]):
    engine = Engine(*windows)
    tokens = list(range(12))
    engine.computed(tokens)
    second = engine.computed(tokens)  # holds the blocks of the first
    engine.kv.forget_content(second)
    assert engine.kv.statistics().num_cached_blocks == 0  # those that a window freed among them
    assert engine.kv.attach_prefix(engine.sequence(tokens)) == 0


def test_content_may_be_cached_again_after_it_was_forgotten():
    engine = Engine()
    first = engine.computed(list(range(12)))
    engine.kv.forget_content(first)
    append(first, 12, 13)
    engine.compute(first)
    assert engine.kv.attach_prefix(engine.sequence(list(range(14)))) == 12


def swapped_out(engine: Engine) -> Sequence:
    """Ten tokens, whose three blocks are on the host."""
    sequence = engine.computed(list(range(10)))
    assert engine.kv.swap_out(sequence)
    engine.worker.forget(sequence.seq_id)
    engine.worker.apply(engine.kv.drain())
    return sequence


def test_swapped_blocks_come_back_only_where_there_is_room():
    engine = Engine(num_blocks=6, num_host_blocks=4)  # five that can be held
    swapped = swapped_out(engine)
    other = engine.computed([90 + i for i in range(13)])  # three blocks
    before = swapped.host_block_ids
    assert engine.kv.num_free_blocks == 2
    assert not engine.kv.swap_in(swapped)
    assert (swapped.host_block_ids, swapped.block_ids, engine.kv.num_free_blocks) == (before, [], 2)
    engine.kv.free(other)
    assert engine.kv.swap_in(swapped)


def test_blocks_that_are_still_on_the_device_take_room_as_well():
    engine = Engine(num_blocks=6, num_host_blocks=4)
    swapped = swapped_out(engine)  # its two full blocks are free now, and can still be found
    other = engine.sequence([90 + i for i in range(13)])
    engine.kv.attach_prefix(other)
    assert engine.kv.grant(other, 12)  # the three blocks without content first: both hits stay
    assert not engine.kv.swap_in(swapped)
    assert engine.kv.num_free_blocks == 2


@pytest.mark.parametrize("num_held", [0, 2])
def test_blocks_in_reserve_stay_free(num_held: int):
    engine = Engine(num_blocks=9)  # eight that can be held
    first = engine.sequence(list(range(30)))
    if num_held:
        assert engine.kv.grant(first, 4 * num_held)
    free = engine.kv.num_free_blocks
    assert not engine.kv.grant(first, 4 * num_held, reserve=free + 1)  # although it needs none
    assert not engine.kv.grant(first, 4 * (num_held + 1), reserve=free)
    assert engine.kv.num_free_blocks == free
    assert engine.kv.grant(first, 4 * (num_held + 1), reserve=free - 1)
    assert engine.kv.num_free_blocks == free - 1


def test_a_reset_says_whether_it_forgot_everything():
    engine = Engine()
    running = engine.computed(list(range(12)))
    assert not engine.kv.reset_prefix_cache()  # vLLM's answer too while blocks are in use
    engine.kv.free(running)
    engine.kv.free(engine.computed(list(range(12))))
    assert engine.kv.reset_prefix_cache()
