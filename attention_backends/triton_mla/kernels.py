"""The Triton kernels of `triton_mla`: latent vectors into pages, and attention of all query heads to them.

A page is [block_size, LATENT + ROTARY]: of each token the latent vector, then the rotated key that all heads share. A
score sums over both, and the first alone is the value, so that a tile reads each vector once for both products. Parts
are put together by `merge_parts` of `paged_triton`, whose kernels.py describes the arrays (`tokens`, `items`, `table`,
`tree`, `members`, `partials`, `sums`). What is a key head there is a group of query heads here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dovetail.attention_backends.paged_triton.kernels import add_sums


@triton.jit
def _attend_block(
    acc,
    highest,
    total,
    q,
    q_rotary,
    start,
    end_key,
    num_cached,
    slots,
    tree_rows,
    kv_cache,
    table,
    tree,
    page_stride,
    factor,
    LATENT: tl.constexpr,
    LATENT_PAD: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    TREES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One step of the online softmax over keys start .. start + BLOCK_N - 1."""
    keys = start + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, LATENT_PAD)
    rotary_dims = tl.arange(0, ROTARY_PAD)
    is_key = keys < end_key
    is_latent, is_rotary = dims[None, :] < LATENT, rotary_dims[None, :] < ROTARY
    if MASKED:
        # All keys of a page ask alike, so that the compiler looks up each page once.
        page = tl.load(table + keys // PAGE, mask=keys // PAGE * PAGE < end_key, other=0)
        is_latent, is_rotary = is_latent & is_key[:, None], is_rotary & is_key[:, None]
    else:
        page = tl.load(table + keys // PAGE)
    begins = page.to(tl.int64) * page_stride + (keys % PAGE) * (LATENT + ROTARY)
    places = kv_cache + begins[:, None]
    if MASKED or LATENT != LATENT_PAD or ROTARY != ROTARY_PAD:
        latents = tl.load(places + dims[None, :], mask=is_latent, other=0.0)
        rotary = tl.load(places + LATENT + rotary_dims[None, :], mask=is_rotary, other=0.0)
    else:
        latents = tl.load(places + dims[None, :])
        rotary = tl.load(places + LATENT + rotary_dims[None, :])
    scores = tl.dot(q, tl.trans(latents), input_precision=PRECISION)
    scores = tl.dot(q_rotary, tl.trans(rotary), scores, input_precision=PRECISION)
    if MASKED:
        seen = is_key[None, :]
        if TREES:
            in_tree = tree_rows >= 0
            pairs = in_tree[:, None] & (seen & (keys >= num_cached)[None, :])
            edges = tl.load(tree + tree_rows[:, None] + (keys - num_cached)[None, :], mask=pairs, other=1)
            seen = seen & (edges != 0) & (in_tree[:, None] | (keys[None, :] <= slots[:, None]))
        else:
            seen = seen & (keys[None, :] <= slots[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, axis=1) * factor)
    shift = new_highest
    if MASKED:
        # A row that has seen no key yet: -inf - -inf is not a number.
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    # `factor` is left to the exponent, in which a product and a sum are one instruction.
    p = tl.exp2(scores * factor - shift[:, None])
    shrink = tl.exp2(highest - shift)
    total = total * shrink + tl.sum(p, axis=1)
    acc = tl.dot(p.to(latents.dtype), latents, acc * shrink[:, None], input_precision=PRECISION)
    return acc, new_highest, total


@triton.jit
def attend_latents(
    query,
    kv_cache,
    output,
    tokens,
    table,
    tree,
    items,
    partials,
    sums,
    members,
    query_stride_t,
    query_stride_h,
    page_stride,
    factor,
    GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_PAD: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    TREES: tl.constexpr,
    SHARES: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Program item * NUM_GROUPS + group: GROUP query heads over the keys of one item.

    Row m of a tile is head m % GROUP of the group, of token m // GROUP. Scores are powers of 2: `factor` is the scale
    times log2(e). SHARES: items of several requests may occur. SPLIT: keys are summed in runs of SPLIT, from position 0
    on, and runs added in order, whatever the items and the rest of the step; 0: in one run. Key ranges begin at
    multiples of BLOCK_N.

    Absorbed multi-head latent attention (DeepSeek-V2, section 2.1) by FlashAttention's online softmax (Dao et al.
    2022).
    """
    group = tl.program_id(0) % NUM_GROUPS
    item = items + tl.program_id(0) // NUM_GROUPS * 8
    count = tl.load(item + 1)
    if count == 0:
        return
    first_token = tl.load(item)
    own_table = table + tl.load(item + 2)
    first_key, end_key = tl.load(item + 3), tl.load(item + 4)
    num_cached, own_first, part = tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, LATENT_PAD)
    rotary_dims = tl.arange(0, ROTARY_PAD)
    is_row = rows < count * GROUP
    row_tokens = (first_token + rows // GROUP).to(tl.int64)
    read_tokens = row_tokens
    if SHARES:
        is_member = rows < tl.where(own_first < 0, count * GROUP, 0)
        member = tl.load(members + row_tokens, mask=is_member, other=0).to(tl.int64)
        read_tokens = tl.where(is_member, member, row_tokens)
    heads = group * GROUP + rows % GROUP
    vectors = query + (read_tokens * query_stride_t + heads * query_stride_h)[:, None]
    cells = is_row[:, None] & (dims[None, :] < LATENT)
    q = tl.load(vectors + dims[None, :], mask=cells, other=0.0)
    rotary_cells = is_row[:, None] & (rotary_dims[None, :] < ROTARY)
    q_rotary = tl.load(vectors + LATENT + rotary_dims[None, :], mask=rotary_cells, other=0.0)
    slots = num_cached + (row_tokens - own_first).to(tl.int32)
    tree_rows = slots
    full_end = num_cached + first_token - own_first + 1
    if TREES:
        tree_rows = tl.load(tokens + read_tokens * 4 + 2, mask=is_row, other=-1)
        full_end = num_cached
    acc = tl.zeros([BLOCK_M, LATENT_PAD], dtype=tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if SPLIT > 0:
        for run in range(first_key // SPLIT * SPLIT, end_key, SPLIT):
            run_acc = tl.zeros([BLOCK_M, LATENT_PAD], dtype=tl.float32)
            run_highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
            run_total = tl.zeros([BLOCK_M], dtype=tl.float32)
            for start in range(tl.maximum(run, first_key), tl.minimum(run + SPLIT, end_key), BLOCK_N):
                run_acc, run_highest, run_total = _attend_block(
                    run_acc, run_highest, run_total, q, q_rotary, start, end_key, num_cached, slots, tree_rows,
                    kv_cache, own_table, tree, page_stride, factor, LATENT, LATENT_PAD, ROTARY, ROTARY_PAD, PAGE,
                    BLOCK_N, PRECISION, TREES, True,
                )  # fmt: skip
            acc, highest, total = add_sums(acc, highest, total, run_acc, run_highest, run_total)
    else:
        # Keys that all rows see need no masks.
        middle = tl.maximum(tl.minimum(full_end, end_key) // BLOCK_N * BLOCK_N, first_key)
        for start in range(first_key, middle, BLOCK_N):
            acc, highest, total = _attend_block(
                acc, highest, total, q, q_rotary, start, end_key, num_cached, slots, tree_rows, kv_cache, own_table,
                tree, page_stride, factor, LATENT, LATENT_PAD, ROTARY, ROTARY_PAD, PAGE, BLOCK_N, PRECISION, TREES,
                False,
            )  # fmt: skip
        for start in range(middle, end_key, BLOCK_N):
            acc, highest, total = _attend_block(
                acc, highest, total, q, q_rotary, start, end_key, num_cached, slots, tree_rows, kv_cache, own_table,
                tree, page_stride, factor, LATENT, LATENT_PAD, ROTARY, ROTARY_PAD, PAGE, BLOCK_N, PRECISION, TREES,
                True,
            )  # fmt: skip
    if part < 0:
        # A row that fills up a graph is after the last key, and may see none at all: 0. All others see their own.
        result = acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
        target = output + ((row_tokens * NUM_GROUPS * GROUP + heads) * LATENT)[:, None] + dims[None, :]
        tl.store(target, result.to(output.dtype.element_ty), mask=cells)
    else:
        lane = part.to(tl.int64) * NUM_GROUPS + group * count * GROUP + rows
        tl.store(partials + lane[:, None] * LATENT_PAD + dims[None, :], acc, mask=is_row[:, None])
        tl.store(sums + lane * 2, highest, mask=is_row)
        tl.store(sums + lane * 2 + 1, total, mask=is_row)


@triton.jit
def write_latents(
    latent, kv_cache, tokens, latent_stride, page_stride, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, PAGE: tl.constexpr
):
    """Program t: the vector of token t into its slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(tokens + token * 4)
    dims = tl.arange(0, SIZE_PAD)
    mask = dims < SIZE
    target = kv_cache + (slot // PAGE).to(tl.int64) * page_stride + slot % PAGE * SIZE + dims
    vector = tl.load(latent + token * latent_stride + dims, mask=mask, other=0.0)
    tl.store(target, vector.to(kv_cache.dtype.element_ty), mask=mask)
