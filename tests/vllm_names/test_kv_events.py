"""KV events as vLLM's consumers read them."""

from __future__ import annotations

import pytest

from dovetail.contracts.router import AllBlocksCleared, BlocksRemoved, BlocksStored
from dovetail.vllm.kv_events import vllm_batch, vllm_event

STORED = BlocksStored(block_hashes=(b"b", b"c"), parent_hash=b"a", token_ids=(1, 2, 3, 4), block_size=2, adapter="l")


def test_events_have_the_fields_of_vllm():
    batch = vllm_batch([STORED, BlocksRemoved(block_hashes=(b"b",)), AllBlocksCleared()], 12.5, 3)
    assert batch == {
        "ts": 12.5,
        "events": [
            {
                "type": "BlockStored",
                "block_hashes": [b"b", b"c"],
                "parent_block_hash": b"a",
                "token_ids": [1, 2, 3, 4],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": "l",
            },
            {"type": "BlockRemoved", "block_hashes": [b"b"], "medium": "GPU"},
            {"type": "AllBlocksCleared"},
        ],
        "data_parallel_rank": 3,
    }


def test_vllm_needs_the_tokens():
    with pytest.raises(ValueError, match="have 0 token ids"):
        vllm_event(BlocksStored(block_hashes=(b"b",), parent_hash=None, token_ids=(), block_size=2))
