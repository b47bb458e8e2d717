"""Random steps that authors of attention backends shape themselves."""

from __future__ import annotations

import pytest

from dovetail.testing.attention_cases import CaseShape, random_case


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 5])
def test_every_key_head_serves_whole_groups(num_kv_heads: int) -> None:
    for seed in range(5):
        layer = random_case(seed, CaseShape(num_kv_heads=num_kv_heads, max_cached=8, max_query=4)).layer
        assert layer.num_kv_heads == num_kv_heads
        assert layer.num_heads % num_kv_heads == 0
