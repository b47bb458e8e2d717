"""The KV cache manager of a model that keeps nothing: no blocks, and prompts that are granted whole or not at all."""

from dovetail.contracts.sampling import SamplingParams
from dovetail.engine.kv.manager import KVCacheManager
from dovetail.engine.sequence import Sequence
from dovetail.worker.kv_layout import build_layout


def manager() -> KVCacheManager:
    return KVCacheManager(build_layout([None, None], 4), 2, prefix_caching=False)


def sequence(seq_id: int = 1, num_tokens: int = 10) -> Sequence:
    return Sequence(seq_id, f"r{seq_id}", list(range(num_tokens)), SamplingParams())


def test_a_prompt_is_granted_whole_or_not_at_all():
    kv, request = manager(), sequence()
    kv.attach_prefix(request)
    assert [kv.grant(request, 9), kv.grant(request, 10)] == [0, 10]
    assert kv.grants == {request.seq_id: 10}


def test_no_number_of_requests_takes_blocks():
    kv = manager()
    requests = [sequence(seq_id, 1000) for seq_id in range(50)]
    for request in requests:
        kv.attach_prefix(request)
        assert kv.num_missing_blocks(request, 1000, reserve=8) == 0
        assert kv.grant(request, 1000, reserve=8) == 1000
    assert kv.statistics().num_used_blocks == 0


def test_a_request_that_ends_leaves_nothing():
    kv, request = manager(), sequence()
    kv.attach_prefix(request)
    kv.grant(request, 10)
    request.num_computed_tokens = 10
    kv.commit(request)
    kv.trim(request)
    kv.free(request)
    changes = kv.drain()
    assert (changes.new_blocks, request.block_ids) == ([], [])


def test_a_preempted_request_is_computed_from_its_beginning():
    kv, request = manager(), sequence()
    kv.attach_prefix(request)
    kv.grant(request, 10)
    request.num_computed_tokens = 10
    assert not kv.swap_out(request)
    kv.release(request)
    assert request.num_computed_tokens == 0
    kv.attach_prefix(request)
    assert kv.grant(request, 10) == 10
