"""How layers become groups and KV tensors, and what fits in memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.contracts.attention import TransientSpec
from dovetail.contracts.errors import CapacityError, ConfigError, ModelError
from dovetail.contracts.kv import KVSpec, LatentSpec, LayerCache, StateSpec
from dovetail.worker.kv_layout import (
    blocks_per_request,
    build_layout,
    check_capacity,
    largest_model_len,
    num_blocks_for,
)


def spec(window: int | None = None) -> KVSpec:
    return KVSpec(num_kv_heads=2, head_size=8, dtype="float32", window=window)


def sizes(layout) -> list[tuple[int | None, int]]:
    return [(group.window, len(group.layer_ids)) for group in layout.groups]


def test_uniform_model_is_one_group():
    layout = build_layout([spec()] * 30, 16)
    assert sizes(layout) == [(None, 30)]
    assert layout.block_bytes == 30 * 2 * 16 * 2 * 8 * 4


def test_equal_kinds_share_all_tensors():
    layout = build_layout([spec(8), spec()] * 13, 16)
    assert sizes(layout) == [(None, 13), (8, 13)]
    assert layout.groups[0].layer_ids == tuple(range(1, 26, 2))


def test_five_windows_to_one_full_layer_are_split_into_tensors_of_the_full_layers():
    caches = [spec() if i % 6 == 5 else spec(512) for i in range(26)]
    layout = build_layout(caches, 16)
    assert sizes(layout) == [(None, 4)] + [(512, 4)] * 5 + [(512, 2)]
    assert layout.num_tensors == 4


def test_splitting_stops_at_eight_groups():
    layout = build_layout([spec(64)] * 32 + [spec()], 16)
    assert len(layout.groups) <= 8


def test_layers_that_cache_nothing_are_left_out():
    layout = build_layout([None, spec(), None, spec()], 16)
    assert layout.groups[0].layer_ids == (1, 3)


def test_a_model_that_keeps_nothing_has_no_groups_and_needs_no_blocks():
    transient = TransientSpec(num_kv_heads=2, head_size=8, dtype="float32")
    layout = build_layout([transient, transient], 16)
    assert (layout.groups, layout.num_tensors, layout.block_bytes) == ((), 0, 0)
    assert blocks_per_request(layout, 512, 512) == 0


def test_page_is_the_largest_of_any_layer():
    layout = build_layout(
        [KVSpec(num_kv_heads=1, head_size=8, dtype="float16"), KVSpec(num_kv_heads=4, head_size=8, dtype="float16")], 16
    )
    assert layout.page_bytes == 2 * 16 * 4 * 8 * 2


def test_an_int8_page_holds_a_float16_scale_per_token_head_and_part():
    assert KVSpec(num_kv_heads=3, head_size=64, dtype="int8").page_bytes(16) == 2 * 16 * 3 * (64 + 2)


def latents(dtype: str = "bfloat16") -> LatentSpec:
    return LatentSpec(latent_size=512, rotary_size=64, dtype=dtype)


def test_a_page_of_latent_vectors_holds_one_per_token():
    """DeepSeek-V2, section 2.1.4: 512 + 64 numbers per token and layer, where 128 heads would have 2 x 128 x 128."""
    assert latents().page_bytes(16) == 16 * (512 + 64) * 2
    assert latents().num_kv_heads == 1
    assert latents().head_size == 576


def test_layers_with_latent_vectors_are_a_kind_of_their_own_and_keep_all_pages():
    heads = KVSpec(num_kv_heads=1, head_size=576, dtype="bfloat16")
    layout = build_layout([latents(), heads, latents(), heads], 16, {"drafter": [latents()]})
    assert [(group.layer_ids, group.window) for group in layout.groups] == [((0, 2), None), ((1, 3), None)]
    assert layout.page_bytes == heads.page_bytes(16) == 2 * latents().page_bytes(16)
    assert layout.extra_tensors[0].page_bytes == (latents().page_bytes(16),)


@pytest.mark.parametrize(
    ("caches", "error", "message"),
    [
        ([StateSpec(num_elements=64, dtype="float32")], ModelError, "recurrent state"),
        ([], ModelError, "no attention layers"),
        ([KVSpec(num_kv_heads=1, head_size=8, dtype="int4")], ConfigError, "int4"),
        ([spec(0)], ModelError, "window of 0"),
        ([latents("int8")], ConfigError, "latent vectors .* cannot be int8 yet; set cache.dtype to auto"),
        ([latents("float8_e4m3fn")], ConfigError, "cannot be float8_e4m3fn yet"),
    ],
)
def test_refusals_say_why(caches: list[LayerCache | None], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        build_layout(caches, 16)


kinds = st.lists(st.integers(1, 24), min_size=1, max_size=4)


@given(kinds)
def test_every_layer_stands_in_one_group_of_at_most_num_tensors(counts: list[int]):
    caches = [spec(window or None) for window, count in enumerate(counts) for _ in range(count)]
    layout = build_layout(caches, 16)
    assert sorted(i for group in layout.groups for i in group.layer_ids) == list(range(len(caches)))
    assert max(len(group.layer_ids) for group in layout.groups) == layout.num_tensors
    assert all(caches[i].window == group.window for group in layout.groups for i in group.layer_ids)


@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 40), st.integers(1, 12))
def test_window_groups_hold_the_window_and_one_step(window: int, block_size: int, num_tokens: int, step: int):
    """Against every start position of a step."""
    layout = build_layout([spec(window)], block_size)
    most = 0
    for start in range(num_tokens):
        end = min(num_tokens, start + step)
        first = max(0, start - window + 1) // block_size
        most = max(most, layout.blocks_for(end) - first)
    assert most <= blocks_per_request(layout, num_tokens, step) <= most + 1


@given(st.lists(st.sampled_from([None, 3, 8]), min_size=1, max_size=3), st.integers(0, 60), st.integers(1, 16))
def test_largest_model_len_against_counting_up(windows: list[int | None], num_blocks: int, step: int):
    layout = build_layout([spec(window) for window in windows], 4)
    fits = [n for n in range(1, 101) if blocks_per_request(layout, n, step) <= num_blocks - 1]
    assert largest_model_len(layout, num_blocks, step, 100) == max(fits, default=0)


def test_null_block_is_counted():
    layout = build_layout([spec()], 16)
    assert num_blocks_for(layout, 10 * layout.block_bytes + 1) == 10
    check_capacity(layout, 5, 64, 64)
    with pytest.raises(CapacityError):
        check_capacity(layout, 4, 64, 64)


def test_capacity_error_says_what_is_missing_and_what_would_fit():
    layout = build_layout([KVSpec(num_kv_heads=8, head_size=128, dtype="float32")], 16)
    with pytest.raises(CapacityError) as error:
        check_capacity(layout, 11, 4096, 512)
    message = str(error.value)
    assert "set max_model_len to 160 or less" in message
    assert f"at least {257 * layout.block_bytes / 2**20:.2f} MiB" in message
    assert f"{246 * layout.block_bytes / 2**20:.2f} MiB are missing" in message
    check_capacity(layout, 11, 160, 512)
    check_capacity(layout, 257, 4096, 512)
