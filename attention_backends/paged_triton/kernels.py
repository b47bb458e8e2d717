"""The Triton kernels of `paged_triton`: attention over pages, and putting split key ranges together. Pages are
filled by the one in `writing.py`.

Arrays that kernels share with `plan.py` (int32 unless said otherwise):

    tokens [T, 4]   slot, position, begin of its row in `tree` or -1, unused
    members         token rows of requests that share a prefix, group by group
    table           block tables of all requests, flat
    items [n, 8]    first token row, tokens (0: nothing to do), begin in `table`, first key, end of keys (of those that
                    are written, which tokens that fill up a graph stand behind), keys before the query of the
                    request, first token row of the request, part (-1: the only one). An item of several requests
                    over keys that they share has its first row in `members`, SHARED and -1 in places 0, 5 and 6
    visits          block-sparse only: for each item and key head, [offset, count] of the key blocks in `blocks`
    merges [n, 8]   first token row, tokens (0: nothing to do), first part, parts, first part over shared keys, parts
                    of these, their tokens, place of the first token row among those

A part is named by the rows of all parts before it, of one key head: part p of n rows lies, for key head h, at row
p * NUM_KV_HEADS + h * n of `partials` and `sums`; parts of one tile follow each other.

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
def add_sums(acc, highest, total, other_acc, other_highest, other_total):
    """Sums over keys and over other keys, as sums over both: [rows, size], [rows], [rows]."""
    new_highest = tl.maximum(highest, other_highest)
    shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    share, other_share = tl.exp2(highest - shift), tl.exp2(other_highest - shift)
    new_acc = acc * share[:, None] + other_acc * other_share[:, None]
    return new_acc, new_highest, total * share + other_total * other_share


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
    members,
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
    SHARES: tl.constexpr,
    SPLIT: tl.constexpr,
    SPARSE: tl.constexpr,
):
    """Program item * NUM_KV_HEADS + head: the query heads of key head `head` over the keys of one item. One dimension,
    since the others of a grid end at 65535.

    Row m of a tile is query head m % GROUP of token m // GROUP. Scores are powers of 2: `factor` is the scale times
    log2(e), and `cap` the soft cap times it; with a cap `factor` is what the tanh is taken of, doubled, as a power of
    2. SHARES: items of several requests may occur. SPLIT: keys are summed in runs of SPLIT, from position 0 on, and
    runs added in order, whatever the items and the rest of the step; 0: in one run. SPARSE: tokens of a key block of
    the pattern, 0 for all keys.

    FlashAttention's online softmax (Dao et al. 2022), with split key ranges as in Flash-Decoding.
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
    read_tokens = row_tokens
    if SHARES:
        is_member = rows < tl.where(own_first < 0, count * GROUP, 0)
        member = tl.load(members + row_tokens, mask=is_member, other=0).to(tl.int64)
        read_tokens = tl.where(is_member, member, row_tokens)
    row_heads = head * GROUP + rows % GROUP
    q_places = read_tokens[:, None] * query_stride_t + row_heads[:, None] * query_stride_h + dims[None, :]
    cells = is_row[:, None] & (dims[None, :] < HEAD)
    q = tl.load(query + q_places, mask=cells, other=0.0)
    if IS_INT8:
        q = turn(q, BLOCK_M, HEAD, HEAD_PAD)
    q = q.to(COMPUTE)
    slots = num_cached + (row_tokens - own_first).to(tl.int32)
    positions = slots
    tree_rows = slots
    full_end = num_cached + first_token - own_first + 1
    if TREES or (SHARES and HAS_SLOPES):
        positions = tl.load(tokens + read_tokens * 4 + 1, mask=is_row, other=0)
    if TREES:
        tree_rows = tl.load(tokens + read_tokens * 4 + 2, mask=is_row, other=-1)
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
    elif SPLIT > 0:
        for run in range(first_key // SPLIT * SPLIT, end_key, SPLIT):
            run_acc = tl.zeros([BLOCK_M, HEAD_PAD], dtype=tl.float32)
            run_highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
            run_total = tl.zeros([BLOCK_M], dtype=tl.float32)
            for start in range(tl.maximum(run, low), tl.minimum(run + SPLIT, end_key), BLOCK_N):
                run_acc, run_highest, run_total = _attend_block(
                    run_acc, run_highest, run_total, q, start, first_key, end_key, num_cached, own_first, positions,
                    slots, tree_rows, slopes, is_row, row_shift, kv_cache, scales, tokens, own_table, tree,
                    page_stride, head_base, factor, cap, window, stride_blocks, local_blocks, sink_blocks, HEAD,
                    HEAD_PAD, PAGE, BLOCK_N, COMPUTE, PRECISION, IS_INT8, HAS_WINDOW, HAS_CAP, HAS_SLOPES, TREES,
                    SPARSE, True,
                )  # fmt: skip
            acc, highest, total = add_sums(acc, highest, total, run_acc, run_highest, run_total)
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
        # Never of several requests: what they share is a part of what each of them sees.
        sink = tl.zeros([BLOCK_M], dtype=tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks + row_heads, mask=is_row, other=0.0) * LOG2_E
        result = acc * _divisor(highest, total, sink, value_scale, HAS_SINKS)[:, None]
        target = row_tokens[:, None] * (NUM_KV_HEADS * GROUP * HEAD) + row_heads[:, None] * HEAD + dims[None, :]
        tl.store(output + target, result.to(output.dtype.element_ty), mask=cells)
    else:
        lane = part.to(tl.int64) * NUM_KV_HEADS + head * count * GROUP + rows
        tl.store(partials + lane[:, None] * HEAD_PAD + dims[None, :], acc, mask=is_row[:, None])
        tl.store(sums + lane * 2, highest, mask=is_row)
        tl.store(sums + lane * 2 + 1, total, mask=is_row)


@triton.jit
def _part_lanes(index, first, num_own, own_rows, own_row, shared_first, shared_rows, shared_row):
    """Rows of `partials` with the parts `index`: first those of the tile's own keys, then those of shared ones."""
    own = first + index.to(tl.int64) * own_rows + own_row
    shared = shared_first + (index - num_own).to(tl.int64) * shared_rows + shared_row
    return tl.where(index < num_own, own, shared)


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
    BLOCK_P: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Program (row, head, merge): one row of a tile whose keys were split, from its parts. The sink joins here, once.

    BLOCK_P: parts that are read at once; 1: they are added one by one, as `attend` adds its runs.
    """
    merge = merges + tl.program_id(2) * 8
    row, head = tl.program_id(0), tl.program_id(1)
    first_token, count = tl.load(merge), tl.load(merge + 1)
    if row >= count * GROUP:
        return
    num_own, num_shared = tl.load(merge + 3), tl.load(merge + 5)
    own_rows = count * GROUP
    shared_rows = tl.load(merge + 6) * GROUP
    own_begin = tl.load(merge + 2).to(tl.int64) * NUM_KV_HEADS
    shared_begin = tl.load(merge + 4).to(tl.int64) * NUM_KV_HEADS
    own_row = head * own_rows + row
    shared_row = head * shared_rows + tl.load(merge + 7) * GROUP + row
    num_parts = num_own + num_shared
    dims = tl.arange(0, HEAD_PAD)
    acc = tl.zeros([1, HEAD_PAD], dtype=tl.float32)
    highest = tl.full([1], float("-inf"), dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    for start in range(0, num_parts, BLOCK_P):
        index = start + tl.arange(0, BLOCK_P)
        is_part = index < num_parts
        lane = _part_lanes(
            index, own_begin, num_own, own_rows * NUM_KV_HEADS, own_row, shared_begin, shared_rows * NUM_KV_HEADS,
            shared_row,
        )  # fmt: skip
        part_highest = tl.load(sums + lane * 2, mask=is_part, other=float("-inf"))
        part_total = tl.load(sums + lane * 2 + 1, mask=is_part, other=0.0)
        vectors = tl.load(partials + lane[:, None] * HEAD_PAD + dims[None, :], mask=is_part[:, None], other=0.0)
        if BLOCK_P > 1:
            top = tl.max(part_highest, axis=0)
            share = tl.exp2(part_highest - tl.where(top == float("-inf"), 0.0, top))
            vectors = tl.sum(vectors * share[:, None], axis=0)[None, :]
            part_total = tl.sum(part_total * share, axis=0) + tl.zeros([1], dtype=tl.float32)
            part_highest = top + tl.zeros([1], dtype=tl.float32)
        acc, highest, total = add_sums(acc, highest, total, vectors, part_highest, part_total)
    token = (first_token + row // GROUP).to(tl.int64)
    query_head = head * GROUP + row % GROUP
    sink = tl.zeros([1], dtype=tl.float32)
    if HAS_SINKS:
        sink += tl.load(sinks + query_head) * LOG2_E
    target = (token * (NUM_KV_HEADS * GROUP) + query_head) * HEAD + dims
    result = acc * _divisor(highest, total, sink, value_scale, HAS_SINKS)[:, None]
    tl.store(output + target[None, :], result.to(output.dtype.element_ty), mask=dims[None, :] < HEAD)
