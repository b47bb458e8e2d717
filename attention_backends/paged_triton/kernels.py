"""The Triton kernels of `paged_triton`: attention over pages, and putting split key ranges together. Pages are
filled by the one in `writing.py`.

Arrays that kernels share with `plan.py` (int32 unless said otherwise):

    tokens [T, 4]   slot, position, begin of its row in `tree` or -1, unused
    table           block tables of all requests, flat
    items [n, 8]    first token row, tokens (0: nothing to do), begin in `table`, first key, end of keys (of those that
                    are written, which tokens that fill up a graph stand behind), keys before the query of the
                    request, first token row of the request, part (-1: the only one)
    visits          block-sparse only: for each item and key head, [offset, count] of the key blocks in `blocks`
    merges [n, 4]   first token row, tokens, first part, parts (0: nothing to do)

A page is [num_kv_heads, 2 (key, value), block_size, head_size]; in int8 each of the two is followed by one float16
scale per token, and keys are turned (see `turning.py`). All kernels take the cache as it lies: only the stride between
pages may differ from this.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dovetail.attention_backends.paged_triton.turning import turn

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend_block(
    acc,
    highest,
    total,
    q,
    start,
    first_key,
    end_key,
    num_cached,
    own_first,
    positions,
    slots,
    tree_rows,
    slopes,
    is_row,
    row_shift,
    kv_cache,
    scales,
    tokens,
    table,
    tree,
    page_stride,
    head_base,
    factor,
    cap,
    window,
    stride_blocks,
    local_blocks,
    sink_blocks,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_INT8: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    TREES: tl.constexpr,
    SPARSE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One step of the online softmax over keys start .. start + BLOCK_N - 1."""
    keys = start + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, HEAD_PAD)
    VECTORS: tl.constexpr = PAGE * HEAD + (2 * PAGE if IS_INT8 else 0)
    is_key = (keys >= first_key) & (keys < end_key)
    if MASKED:
        page = tl.load(table + keys // PAGE, mask=is_key, other=0)
        loads = is_key[:, None] & (dims[None, :] < HEAD)
    else:
        page = tl.load(table + keys // PAGE)
        loads = dims[None, :] < HEAD
    base = page.to(tl.int64) * page_stride + head_base
    places = base[:, None] + ((keys % PAGE) * HEAD)[:, None] + dims[None, :]
    if MASKED or HEAD != HEAD_PAD:
        k = tl.load(kv_cache + places, mask=loads, other=0.0)
        v = tl.load(kv_cache + places + VECTORS, mask=loads, other=0.0)
    else:
        k = tl.load(kv_cache + places)
        v = tl.load(kv_cache + places + VECTORS)
    scores = tl.dot(q, tl.trans(k.to(COMPUTE)), input_precision=PRECISION)
    if IS_INT8:
        scale_places = (base + PAGE * HEAD) // 2 + keys % PAGE
        key_scales = tl.load(scales + scale_places, mask=is_key, other=0.0)
        value_scales = tl.load(scales + scale_places + VECTORS // 2, mask=is_key, other=0.0)
        scores *= key_scales.to(tl.float32)[None, :]
    if HAS_CAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores * factor) + 1.0))
    elif HAS_SLOPES:
        scores *= factor
    if MASKED:
        seen = is_key[None, :] & is_row[:, None]
        key_positions = keys
        if TREES:
            is_own = (keys >= num_cached) & is_key
            own = tl.load(tokens + (own_first + keys - num_cached) * 4 + 1, mask=is_own, other=0)
            key_positions = tl.where(is_own, own, keys)
            in_tree = tree_rows >= 0
            pairs = in_tree[:, None] & is_own[None, :]
            edges = tl.load(tree + tree_rows[:, None] + (keys - num_cached)[None, :], mask=pairs, other=1)
            seen &= (edges != 0) & (in_tree[:, None] | (keys[None, :] <= slots[:, None]))
        else:
            seen &= keys[None, :] <= slots[:, None]
        if HAS_WINDOW:
            seen &= key_positions[None, :] > positions[:, None] - window
        if SPARSE > 0:
            key_block = start // SPARSE
            query_blocks = positions // SPARSE
            is_strided = (stride_blocks > 0) & ((key_block + row_shift + 1) % tl.maximum(stride_blocks, 1) == 0)
            in_pattern = (query_blocks - key_block < local_blocks) | is_strided | (key_block < sink_blocks)
            seen &= in_pattern[:, None]
        if HAS_SLOPES:
            scores += slopes[:, None] * (key_positions[None, :] - positions[:, None]).to(tl.float32)
        scores = tl.where(seen, scores, float("-inf"))
    elif HAS_SLOPES:
        scores += slopes[:, None] * (keys[None, :] - positions[:, None]).to(tl.float32)
    # Where nothing came between, `factor` is left to the exponent, in which a product and a sum are one instruction.
    IS_SCALED: tl.constexpr = HAS_CAP or HAS_SLOPES
    top = tl.max(scores, axis=1)
    new_highest = tl.maximum(highest, top if IS_SCALED else top * factor)
    shift = new_highest
    if MASKED:
        # A row that has seen no key yet: -inf - -inf is not a number.
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    p = tl.exp2((scores if IS_SCALED else scores * factor) - shift[:, None])
    shrink = tl.exp2(highest - shift)
    total = total * shrink + tl.sum(p, axis=1)
    if IS_INT8:
        p *= value_scales.to(tl.float32)[None, :]
    acc = acc * shrink[:, None] + tl.dot(p.to(COMPUTE), v.to(COMPUTE), input_precision=PRECISION)
    return acc, new_highest, total


@triton.jit
def _divisor(highest, total, sink, value_scale, HAS_SINKS: tl.constexpr):
    """What sums of weighted values are multiplied by. The sink joins the sum of the weights; it has no value."""
    if HAS_SINKS:
        top = tl.maximum(highest, sink)
        share = tl.exp2(highest - top)
        return value_scale * share / (total * share + tl.exp2(sink - top))
    # A row that fills up a graph is after the last key, and may see none at all: 0. All others see their own.
    return value_scale / tl.where(total == 0.0, 1.0, total)


@triton.jit
def attend(
    query,
    kv_cache,
    scales,
    output,
    tokens,
    table,
    tree,
    items,
    visits,
    blocks,
    partials,
    sums,
    alibi,
    sinks,
    shifts,
    query_stride_t,
    query_stride_h,
    page_stride,
    factor,
    cap,
    value_scale,
    window,
    stride_blocks,
    local_blocks,
    sink_blocks,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_INT8: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    TREES: tl.constexpr,
    SPARSE: tl.constexpr,
):
    """Program item * NUM_KV_HEADS + head: the query heads of key head `head` over the keys of one item. One dimension,
    since the others of a grid end at 65535.

    Row m of a tile is query head m % GROUP of token m // GROUP. Scores are powers of 2: `factor` is the scale times
    log2(e), and `cap` the soft cap times it; with a cap `factor` is what the tanh is taken of, doubled, as a power of
    2. SPARSE: tokens of a key block of the pattern, 0 for all keys. FlashAttention's online softmax (Dao et al. 2022), with split key ranges as in Flash-Decoding.
    """
    index = tl.program_id(0) // NUM_KV_HEADS
    head = tl.program_id(0) % NUM_KV_HEADS
    item = items + index * 8
    count = tl.load(item + 1)
    if count == 0:
        return
    first_token, begin = tl.load(item), tl.load(item + 2)
    first_key, end_key = tl.load(item + 3), tl.load(item + 4)
    num_cached, own_first, part = tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_PAD)
    is_row = rows < count * GROUP
    row_tokens = (first_token + rows // GROUP).to(tl.int64)
    row_heads = head * GROUP + rows % GROUP
    q_places = row_tokens[:, None] * query_stride_t + row_heads[:, None] * query_stride_h + dims[None, :]
    cells = is_row[:, None] & (dims[None, :] < HEAD)
    q = tl.load(query + q_places, mask=cells, other=0.0)
    if IS_INT8:
        q = turn(q, BLOCK_M, HEAD, HEAD_PAD)
    q = q.to(COMPUTE)
    slots = num_cached + (row_tokens - own_first).to(tl.int32)
    positions = slots
    tree_rows = slots
    full_end = num_cached + first_token - own_first + 1
    if TREES:
        positions = tl.load(tokens + row_tokens * 4 + 1, mask=is_row, other=0)
        tree_rows = tl.load(tokens + row_tokens * 4 + 2, mask=is_row, other=-1)
        full_end = num_cached
    slopes = tl.zeros([BLOCK_M], dtype=tl.float32)
    if HAS_SLOPES:
        slopes = tl.load(alibi + row_heads, mask=is_row, other=0.0) * LOG2_E
    row_shift = tl.zeros([BLOCK_M], dtype=tl.int32)
    if SPARSE > 0:
        row_shift = tl.load(shifts + row_heads, mask=is_row, other=0)
    acc = tl.zeros([BLOCK_M, HEAD_PAD], dtype=tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    VECTORS: tl.constexpr = PAGE * HEAD + (2 * PAGE if IS_INT8 else 0)
    head_base = head * (2 * VECTORS)
    own_table = table + begin
    low = first_key // BLOCK_N * BLOCK_N
    if SPARSE > 0:
        PER_BLOCK: tl.constexpr = SPARSE // BLOCK_N
        visit = visits + tl.program_id(0) * 2
        list_begin, list_count = tl.load(visit), tl.load(visit + 1)
        for i in range(list_count * PER_BLOCK):
            start = tl.load(blocks + list_begin + i // PER_BLOCK) * SPARSE + (i % PER_BLOCK) * BLOCK_N
            acc, highest, total = _attend_block(
                acc, highest, total, q, start, first_key, end_key, num_cached, own_first, positions, slots, tree_rows,
                slopes, is_row, row_shift, kv_cache, scales, tokens, own_table, tree, page_stride, head_base, factor,
                cap, window, stride_blocks, local_blocks, sink_blocks, HEAD, HEAD_PAD, PAGE, BLOCK_N, COMPUTE,
                PRECISION, IS_INT8, HAS_WINDOW, HAS_CAP, HAS_SLOPES, TREES, SPARSE, True,
            )  # fmt: skip
    else:
        middle = low
        if not HAS_WINDOW:
            # Keys that all rows see need no masks; ranges of one request begin at multiples of BLOCK_N.
            middle = tl.maximum(tl.minimum(full_end, end_key) // BLOCK_N * BLOCK_N, low)
            for start in range(low, middle, BLOCK_N):
                acc, highest, total = _attend_block(
                    acc, highest, total, q, start, first_key, end_key, num_cached, own_first, positions, slots,
                    tree_rows, slopes, is_row, row_shift, kv_cache, scales, tokens, own_table, tree, page_stride,
                    head_base, factor, cap, window, stride_blocks, local_blocks, sink_blocks, HEAD, HEAD_PAD,
                    PAGE, BLOCK_N, COMPUTE, PRECISION, IS_INT8, HAS_WINDOW, HAS_CAP, HAS_SLOPES, TREES, SPARSE, False,
                )  # fmt: skip
        for start in range(middle, end_key, BLOCK_N):
            acc, highest, total = _attend_block(
                acc, highest, total, q, start, first_key, end_key, num_cached, own_first, positions, slots, tree_rows,
                slopes, is_row, row_shift, kv_cache, scales, tokens, own_table, tree, page_stride, head_base, factor,
                cap, window, stride_blocks, local_blocks, sink_blocks, HEAD, HEAD_PAD, PAGE, BLOCK_N, COMPUTE,
                PRECISION, IS_INT8, HAS_WINDOW, HAS_CAP, HAS_SLOPES, TREES, SPARSE, True,
            )  # fmt: skip
    if part < 0:
        sink = tl.zeros([BLOCK_M], dtype=tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks + row_heads, mask=is_row, other=0.0) * LOG2_E
        result = acc * _divisor(highest, total, sink, value_scale, HAS_SINKS)[:, None]
        target = row_tokens[:, None] * (NUM_KV_HEADS * GROUP * HEAD) + row_heads[:, None] * HEAD + dims[None, :]
        tl.store(output + target, result.to(output.dtype.element_ty), mask=cells)
    else:
        lane = (part * NUM_KV_HEADS + head).to(tl.int64) * BLOCK_M + rows
        tl.store(partials + lane[:, None] * HEAD_PAD + dims[None, :], acc, mask=is_row[:, None])
        tl.store(sums + lane * 2, highest, mask=is_row)
        tl.store(sums + lane * 2 + 1, total, mask=is_row)


@triton.jit
def merge_parts(
    output,
    merges,
    partials,
    sums,
    sinks,
    value_scale,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Program (row, head, merge): one row of a tile whose keys were split, from its parts. The sink joins here, once."""
    merge = merges + tl.program_id(2) * 4
    row, head = tl.program_id(0), tl.program_id(1)
    first_token, count = tl.load(merge), tl.load(merge + 1)
    first_part, num_parts = tl.load(merge + 2), tl.load(merge + 3)
    if row >= count * GROUP:
        return
    dims = tl.arange(0, HEAD_PAD)
    acc = tl.zeros([HEAD_PAD], dtype=tl.float32)
    highest = tl.full([], float("-inf"), dtype=tl.float32)
    total = tl.zeros([], dtype=tl.float32)
    for start in range(0, num_parts, BLOCK_P):
        index = start + tl.arange(0, BLOCK_P)
        is_part = index < num_parts
        lane = ((first_part + index) * NUM_KV_HEADS + head).to(tl.int64) * BLOCK_M + row
        part_highest = tl.load(sums + lane * 2, mask=is_part, other=float("-inf"))
        part_total = tl.load(sums + lane * 2 + 1, mask=is_part, other=0.0)
        vectors = tl.load(partials + lane[:, None] * HEAD_PAD + dims[None, :], mask=is_part[:, None], other=0.0)
        new_highest = tl.maximum(highest, tl.max(part_highest, axis=0))
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        share = tl.exp2(part_highest - shift)
        shrink = tl.exp2(highest - shift)
        total = total * shrink + tl.sum(part_total * share, axis=0)
        acc = acc * shrink + tl.sum(vectors * share[:, None], axis=0)
        highest = new_highest
    token = (first_token + row // GROUP).to(tl.int64)
    query_head = head * GROUP + row % GROUP
    sink = 0.0
    if HAS_SINKS:
        sink = tl.load(sinks + query_head) * LOG2_E
    target = (token * (NUM_KV_HEADS * GROUP) + query_head) * HEAD + dims
    result = acc * _divisor(highest, total, sink, value_scale, HAS_SINKS)
    tl.store(output + target, result.to(output.dtype.element_ty), mask=dims < HEAD)
