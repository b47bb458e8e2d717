"""What contracts reserve for later is refused today, each by a sentence that names it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dovetail.contracts.attention import AttentionBatch, AttentionLayer
from dovetail.contracts.errors import ModelError, PluginError
from dovetail.contracts.kv import CrossSpec, KVSpec, LayerCache
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.step import KVEvent, MediaItem, NewRequest, StepResult
from dovetail.worker.kv_layout import build_layout

PICTURE = MediaItem(content_hash="0" * 64, handle="shm:7", first_token=1, num_tokens=4)
STORED = KVEvent(kind="stored", block_hash=b"\x00" * 32)
REQUEST = NewRequest(1, "one", [3, 4], 2, 0, ([1],), SamplingParams(), 0)
BATCH = AttentionBatch(*[np.zeros(1, np.int32)] * 4, max_query_len=1, max_seq_len=1)
RECORDS = {
    "NewRequest": REQUEST,
    "StepResult": StepResult(0, [5]),
    "AttentionLayer": AttentionLayer(0, 1, 1, 8, 1.0),
    "AttentionBatch": BATCH,
}


@pytest.mark.parametrize(
    ("name", "value", "missing"),
    [
        ("NewRequest.media", (PICTURE,), "workers read no media yet"),
        ("NewRequest.trace_context", "00-1-2-01", "workers report no spans yet"),
        ("StepResult.weight_version", 1, "the engine counts the versions, between requests"),
        ("StepResult.kv_events", (STORED,), "the engine publishes no KV events yet"),
        ("AttentionBatch.spans", {0: ((1, 5),)}, "no attention backend reads masks of spans yet"),
    ],
)
def test_a_reserved_field_is_refused_when_it_is_used(name: str, value: Any, missing: str) -> None:
    record, field = name.split(".")
    with pytest.raises(PluginError, match=re.escape(f"{name} is reserved: {missing}")):
        replace(RECORDS[record], **{field: value})


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (
            CrossSpec(num_kv_heads=2, head_size=8, dtype="float32", max_tokens=100),
            "no request has an encoder's input yet",
        ),
    ],
)
def test_a_layer_with_a_reserved_cache_is_refused(cache: LayerCache, reason: str) -> None:
    with pytest.raises(ModelError, match=f"layer 1 .*{reason}"):
        build_layout([KVSpec(num_kv_heads=2, head_size=8, dtype="float32"), cache], 16)


def test_pages_of_an_encoder_are_as_large_as_those_of_all_heads() -> None:
    heads = KVSpec(num_kv_heads=128, head_size=128, dtype="bfloat16")
    assert CrossSpec(num_kv_heads=128, head_size=128, dtype="bfloat16", max_tokens=8).page_bytes(
        16
    ) == heads.page_bytes(16)
