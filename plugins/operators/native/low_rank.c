/* Adds low-rank adapters (dovetail.contracts.operators.AddsNarrowLowRank) to float32 and bfloat16 rows.
 *
 * Rows are sorted by slot, and cut into blocks of one slot each. Of each block the inner products h = a x go to scratch
 * memory, then h b is added to the outputs; with too few blocks for the threads, all inner products come first. Some
 * rows and some ranks share the registers, but each number is summed in an order that depends on the sizes alone, and
 * by the same operations, so a row's bits are the same in any batch: everything is computed in whole vectors, the ends
 * of rows too, and the compiler fuses all products alike.
 */
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <dovetail/numbers.h>
#include <dovetail/team.h>

#define INLINE DOVETAIL_INLINE
#define UNROLL _Pragma("GCC unroll 8")

#if defined(__AVX512F__)
#define VL 16
#define TILE_ROWS 4
#elif defined(__AVX__)
#define VL 8
#define TILE_ROWS 2
#else
#define VL 4
#define TILE_ROWS 2
#endif

/* Waking the other threads costs about as much as so many products do in one. */
#define SERIAL_PRODUCTS 131072
#define BLOCK_ROWS 16  /* that read the same numbers of an adapter */
#define TILE_RANKS 4
#define FEW_ROWS_RANKS 8 /* ranks that share the registers where there are one or two rows */
#define TILE_VECTORS 4
#define TILE_COLUMNS (TILE_VECTORS * VL)
#define TURN_COLUMNS (4 * TILE_COLUMNS)
#define BLOCKS_PER_THREAD 4 /* with fewer, blocks are cut into pieces */

typedef float vec __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(VL * 2), aligned(2), may_alias));

/* Arguments of the kernels that Python calls, mirrored in low_rank.py. */
typedef struct {
    void *y;
    const void *x, *a, *b;
    const int32_t *part_starts, *ranks, *slots;
    void *scratch; /* of scratch_bytes */
    int64_t rows, y_stride, x_stride, num_slots, num_parts, max_rank, in_features, out_features;
    int32_t threads;
} LowRankCall;

typedef struct {
    int32_t first, count, slot; /* rows order[first] .. order[first + count - 1] */
} Block;

typedef struct {
    const LowRankCall *c;
    const int32_t *order;
    const Block *blocks;
    float *inner;               /* [rows][num_parts][max_rank], by place in the order */
    int64_t rank_pieces, column_pieces; /* of a block */
    enum { WHOLE_BLOCKS, OF_RANKS, OF_COLUMNS } pieces; /* that the turns are */
} LowRankLoop;

/* ---- numbers ---- */

/* dtypes of rows and of adapters. */
#define F32 0
#define BF16 1
#define F16 2

INLINE vec from_bfloat16(const halves *narrow) {
#if defined(__AVX512F__)
    return (vec)((words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)narrow)) << 16);
#elif defined(__AVX2__)
    return (vec)((words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)narrow)) << 16);
#else
    return (vec)(__builtin_convertvector(*narrow, words) << 16);
#endif
}

INLINE vec from_float16(const halves *narrow) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)narrow));
#elif defined(__AVX2__) && defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)narrow));
#else
    vec wide;
    for (int i = 0; i < VL; i++) wide[i] = dovetail_from_float16((*narrow)[i]);
    return wide;
#endif
}

INLINE int64_t bytes_of(const int dtype) { return dtype == F32 ? 4 : 2; }

/* The `count` elements from i on, and zeros behind them. */
INLINE vec load(const int dtype, const void *data, int64_t i, const int64_t count) {
    if (dtype == F32) {
        if (count >= VL) return *(const vec *)((const float *)data + i);
        vec x = {0};
        memcpy(&x, (const float *)data + i, 4 * (size_t)count);
        return x;
    }
    const halves *from = (const halves *)((const uint16_t *)data + i);
    halves narrow = {0};
    if (count < VL) {
        memcpy(&narrow, from, 2 * (size_t)count);
        from = &narrow;
    }
    return dtype == BF16 ? from_bfloat16(from) : from_float16(from);
}

INLINE void store(const int dtype, void *data, int64_t i, const int64_t count, vec x) {
    if (dtype == F32) {
        if (count >= VL)
            *(vec *)((float *)data + i) = x;
        else
            memcpy((float *)data + i, &x, 4 * (size_t)count);
        return;
    }
    words bits = (words)x;
    words is_nan = (words)(x != x);
    words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    halves narrow = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0), halves);
    if (count >= VL)
        *(halves *)((uint16_t *)data + i) = narrow;
    else
        memcpy((uint16_t *)data + i, &narrow, 2 * (size_t)count);
}

#if VL == 16
/* Adds the halves of p and those of q, then their quarters, and so on; the sums of both share a vector. */
#define ADD_HALVES(shuffle, first, second, p, q) ((vec)shuffle(p, q, first) + (vec)shuffle(p, q, second))
#define ADD_8(p, q) ADD_HALVES(_mm512_shuffle_f32x4, 0x44, 0xee, (__m512)(p), (__m512)(q))
#define ADD_4(p, q) ADD_HALVES(_mm512_shuffle_f32x4, 0x88, 0xdd, (__m512)(p), (__m512)(q))
#define ADD_2(p, q) ADD_HALVES(_mm512_shuffle_ps, 0x44, 0xee, (__m512)(p), (__m512)(q))
#define ADD_1(p, q) ADD_HALVES(_mm512_shuffle_ps, 0x88, 0xdd, (__m512)(p), (__m512)(q))

INLINE float sum_of(vec x) {
    x = ADD_8(x, x);
    x = ADD_4(x, x);
    x = ADD_2(x, x);
    return ADD_1(x, x)[0];
}

/* The sum of x[i] in place i, for 16 vectors: in the order of sum_of, with fewer operations. */
INLINE vec sums_of(const vec *x) {
    vec part[4];
    UNROLL for (int i = 0; i < 4; i++) part[i] = ADD_4(ADD_8(x[i], x[4 + i]), ADD_8(x[8 + i], x[12 + i]));
    return ADD_1(ADD_2(part[0], part[1]), ADD_2(part[2], part[3]));
}
#else
INLINE float sum_of(vec x) {
    float part[VL];
    memcpy(part, &x, sizeof part);
    UNROLL for (int width = VL / 2; width > 0; width /= 2)
        UNROLL for (int i = 0; i < width; i++) part[i] += part[i + width];
    return part[0];
}
#endif

/* Adapters come from memory, a few rows of each at a time, which is too short for the processor to see them coming. */
INLINE void fetch_ahead(const char *data, const int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(data + i, 0, 3);
}

/* ---- the inner products ---- */

/* Vectors that one step of a sum takes: a register's worth of narrow numbers is two of them. */
INLINE int vectors_of(const int a_dtype) { return a_dtype == F32 ? 1 : 2; }

/* The elements of a step, zeros behind the first `count`. Where rows and adapters are bfloat16, those in even places
 * apart from those in odd ones, which costs less than to keep their order. */
INLINE void load_step(const int dtype, const int in_pairs, const int V, const void *data, int64_t i,
                      const int64_t count, vec *to) {
    if (!in_pairs) {
        UNROLL for (int v = 0; v < V; v++) {
            const int64_t left = count - v * VL;
            to[v] = left > 0 ? load(dtype, data, i + v * VL, left) : (vec){0};
        }
        return;
    }
    words pairs = {0};
    if (count >= 2 * VL)
        pairs = *(const words *)((const uint16_t *)data + i);
    else
        memcpy(&pairs, (const uint16_t *)data + i, 2 * (size_t)count);
    to[0] = (vec)(pairs << 16);
    to[1] = (vec)(pairs & 0xffff0000);
}

INLINE void shrink_step(const int dtype, const int a_dtype, const int T, const int R, const void *const *x,
                        const char *a, int64_t stride, int64_t i, const int64_t count, vec (*sum)[FEW_ROWS_RANKS]) {
    const int V = vectors_of(a_dtype), in_pairs = dtype == BF16 && a_dtype == BF16;
    vec own[TILE_ROWS][2], row[2];
    UNROLL for (int t = 0; t < T; t++) load_step(dtype, in_pairs, V, x[t], i, count, own[t]);
    UNROLL for (int r = 0; r < R; r++) {
        load_step(a_dtype, in_pairs, V, a + r * stride, i, count, row);
        UNROLL for (int t = 0; t < T; t++) UNROLL for (int v = 0; v < V; v++) sum[t][r] += own[t][v] * row[v];
    }
}

/* h[t][r] for T rows and R ranks. The next ranks lie behind them; `is_first`: no rows before these have read them. */
INLINE void shrink_tile(const int dtype, const int a_dtype, const int T, const int R, const void *const *x,
                        const char *a, int64_t size, float *const *h, const int is_first) {
    vec sum[TILE_ROWS][FEW_ROWS_RANKS];
    const int64_t stride = size * bytes_of(a_dtype), step = vectors_of(a_dtype) * VL;
    UNROLL for (int t = 0; t < T; t++) UNROLL for (int r = 0; r < R; r++) sum[t][r] = (vec){0};
    int64_t i = 0;
    for (; i + step <= size; i += step) {
        if (is_first)
            UNROLL for (int r = 0; r < R; r++) fetch_ahead(a + (R + r) * stride + i * bytes_of(a_dtype), VL * 4);
        shrink_step(dtype, a_dtype, T, R, x, a, stride, i, step, sum);
    }
    if (i < size) shrink_step(dtype, a_dtype, T, R, x, a, stride, i, size - i, sum);
#if VL == 16
    if (R > 1) {
        vec all[16] = {{0}};
        UNROLL for (int t = 0; t < T; t++) UNROLL for (int r = 0; r < R; r++) all[t * R + r] = sum[t][r];
        const vec sums = sums_of(all);
        UNROLL for (int t = 0; t < T; t++) memcpy(h[t], (const float *)&sums + t * R, 4 * (size_t)R);
        return;
    }
#endif
    UNROLL for (int t = 0; t < T; t++) UNROLL for (int r = 0; r < R; r++) h[t][r] = sum_of(sum[t][r]);
}

/* Ranks begin .. end - 1 of one part, of T rows. */
INLINE void shrink_ranks(const int dtype, const int a_dtype, const int T, const int R, const void *const *x,
                         const char *a, int64_t size, float *const *h, int64_t begin, int64_t end,
                         const int is_first) {
    const int64_t stride = size * bytes_of(a_dtype);
    float *to[TILE_ROWS];
    int64_t r = begin;
    for (; r + R <= end; r += R) {
        UNROLL for (int t = 0; t < T; t++) to[t] = h[t] + r;
        shrink_tile(dtype, a_dtype, T, R, x, a + r * stride, size, to, is_first);
    }
    for (; r < end; r++) {
        UNROLL for (int t = 0; t < T; t++) to[t] = h[t] + r;
        shrink_tile(dtype, a_dtype, T, 1, x, a + r * stride, size, to, is_first);
    }
}

/* Piece p of a block: FEW_ROWS_RANKS ranks of one part. */
INLINE void shrink_piece(const int dtype, const int a_dtype, const LowRankLoop *loop, const Block *block,
                         int64_t piece) {
    const LowRankCall *c = loop->c;
    const int64_t per_part = (c->max_rank + FEW_ROWS_RANKS - 1) / FEW_ROWS_RANKS;
    const int64_t part = piece / per_part, begin = piece % per_part * FEW_ROWS_RANKS;
    int64_t end = c->ranks[block->slot];
    if (end > begin + FEW_ROWS_RANKS) end = begin + FEW_ROWS_RANKS;
    const int64_t size = c->in_features;
    const char *a =
        (const char *)c->a + (block->slot * c->num_parts + part) * c->max_rank * size * bytes_of(a_dtype);
    const void *x[BLOCK_ROWS];
    float *h[BLOCK_ROWS];
    for (int i = 0; i < block->count; i++) {
        x[i] = (const char *)c->x + loop->order[block->first + i] * c->x_stride * bytes_of(dtype);
        h[i] = loop->inner + ((block->first + i) * c->num_parts + part) * c->max_rank;
    }
    int i = 0;
#if TILE_ROWS > 2
    for (; i + TILE_ROWS <= block->count; i += TILE_ROWS)
        shrink_ranks(dtype, a_dtype, TILE_ROWS, TILE_RANKS, x + i, a, size, h + i, begin, end, i == 0);
#endif
    for (; i + 2 <= block->count; i += 2)
        shrink_ranks(dtype, a_dtype, 2, TILE_RANKS, x + i, a, size, h + i, begin, end, i == 0);
    for (; i < block->count; i++)
        shrink_ranks(dtype, a_dtype, 1, FEW_ROWS_RANKS, x + i, a, size, h + i, begin, end, i == 0);
}

/* ---- their way to the outputs ---- */

/* Columns column .. column + count - 1 of T rows, V vectors of them: count is V * VL, or less where V is 1. */
INLINE void expand_tile(const int dtype, const int b_dtype, const int T, const int V, char *const *y, const char *b,
                        int64_t stride, const float *const *h, int64_t rank, int64_t column, const int64_t count,
                        const int is_first) {
    vec sum[TILE_ROWS][TILE_VECTORS];
    UNROLL for (int t = 0; t < T; t++) UNROLL for (int v = 0; v < V; v++) sum[t][v] = (vec){0};
    for (int64_t r = 0; r < rank; r++) {
        vec row[TILE_VECTORS];
        if (V > 1 && is_first)
            fetch_ahead(b + r * stride + (column + count) * bytes_of(b_dtype), V * VL * bytes_of(b_dtype));
        UNROLL for (int v = 0; v < V; v++) row[v] = load(b_dtype, b + r * stride, column + v * VL, count - v * VL);
        UNROLL for (int t = 0; t < T; t++) UNROLL for (int v = 0; v < V; v++) sum[t][v] += h[t][r] * row[v];
    }
    UNROLL for (int t = 0; t < T; t++)
        UNROLL for (int v = 0; v < V; v++) {
            const int64_t place = column + v * VL, left = count - v * VL;
            store(dtype, y[t], place, left, load(dtype, y[t], place, left) + sum[t][v]);
        }
}

/* Columns begin .. end - 1, all of one part, of T rows. */
INLINE void expand_columns(const int dtype, const int b_dtype, const int T, char *const *y, const char *b,
                           int64_t stride, const float *const *h, int64_t rank, int64_t begin, int64_t end,
                           const int is_first) {
    for (; begin + TILE_COLUMNS <= end; begin += TILE_COLUMNS)
        expand_tile(dtype, b_dtype, T, TILE_VECTORS, y, b, stride, h, rank, begin, TILE_COLUMNS, is_first);
    for (; begin + VL <= end; begin += VL)
        expand_tile(dtype, b_dtype, T, 1, y, b, stride, h, rank, begin, VL, is_first);
    if (begin < end) expand_tile(dtype, b_dtype, T, 1, y, b, stride, h, rank, begin, end - begin, is_first);
}

/* Piece p of a block: TURN_COLUMNS columns, or what there is of them, in each part. */
INLINE void expand_piece(const int dtype, const int b_dtype, const LowRankLoop *loop, const Block *block,
                         int64_t piece) {
    const LowRankCall *c = loop->c;
    const int64_t stride = c->out_features * bytes_of(b_dtype);
    const char *b = (const char *)c->b + block->slot * c->max_rank * stride;
    for (int64_t part = 0; part < c->num_parts; part++) {
        int64_t begin = piece * TURN_COLUMNS, end = begin + TURN_COLUMNS;
        if (begin < c->part_starts[part]) begin = c->part_starts[part];
        if (end > c->part_starts[part + 1]) end = c->part_starts[part + 1];
        if (begin >= end) continue;
        char *y[BLOCK_ROWS];
        const float *h[BLOCK_ROWS];
        for (int i = 0; i < block->count; i++) {
            y[i] = (char *)c->y + loop->order[block->first + i] * c->y_stride * bytes_of(dtype);
            h[i] = loop->inner + ((block->first + i) * c->num_parts + part) * c->max_rank;
        }
        const int64_t rank = c->ranks[block->slot];
        int i = 0;
#if TILE_ROWS > 2
        for (; i + TILE_ROWS <= block->count; i += TILE_ROWS)
            expand_columns(dtype, b_dtype, TILE_ROWS, y + i, b, stride, h + i, rank, begin, end, i == 0);
#endif
        for (; i + 2 <= block->count; i += 2)
            expand_columns(dtype, b_dtype, 2, y + i, b, stride, h + i, rank, begin, end, i == 0);
        for (; i < block->count; i++)
            expand_columns(dtype, b_dtype, 1, y + i, b, stride, h + i, rank, begin, end, i == 0);
    }
}

/* ---- turns ---- */

/* A turn is a whole block, inner products and then outputs, or one piece of either. */
INLINE void turn_of(const int dtype, const int a_dtype, const LowRankLoop *loop, int64_t turn) {
    const int is_whole = loop->pieces == WHOLE_BLOCKS;
    const int64_t per_block = is_whole ? 1 : loop->pieces == OF_RANKS ? loop->rank_pieces : loop->column_pieces;
    const int64_t one = turn % per_block;
    const Block *block = &loop->blocks[turn / per_block];
    if (loop->pieces != OF_COLUMNS)
        for (int64_t i = is_whole ? 0 : one; i < (is_whole ? loop->rank_pieces : one + 1); i++)
            shrink_piece(dtype, a_dtype, loop, block, i);
    if (loop->pieces != OF_RANKS)
        for (int64_t i = is_whole ? 0 : one; i < (is_whole ? loop->column_pieces : one + 1); i++)
            expand_piece(dtype, a_dtype, loop, block, i);
}

#define TURN(name, dtype, a_dtype)                                                                            \
    static void name(const void *loop, int64_t turn, int32_t thread) {                                        \
        (void)thread;                                                                                         \
        turn_of(dtype, a_dtype, loop, turn);                                                                  \
    }

TURN(turn_f32_f32, F32, F32)
TURN(turn_f32_bf16, F32, BF16)
TURN(turn_f32_f16, F32, F16)
TURN(turn_bf16_bf16, BF16, BF16)

/* ---- the call ---- */

static int64_t in_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

int64_t scratch_bytes(int64_t rows, int64_t num_slots, int64_t num_parts, int64_t max_rank) {
    return in_lines(rows * num_parts * max_rank * 4) + in_lines(rows * 4) + in_lines(rows * (int64_t)sizeof(Block))
        + in_lines((num_slots + 1) * 4) + 64;
}

/* Sorts the rows that have an adapter here by its slot; returns the number of blocks. `place`: [num_slots + 1]. */
static int64_t make_blocks(const LowRankCall *c, int32_t *order, Block *blocks, int32_t *place) {
    int64_t num_blocks = 0;
    memset(place, 0, (size_t)(c->num_slots + 1) * 4);
    for (int64_t i = 0; i < c->rows; i++) {
        const int32_t slot = c->slots[i];
        if (slot >= 0 && slot < c->num_slots && c->ranks[slot] > 0) place[slot + 1]++;
    }
    for (int64_t slot = 0; slot < c->num_slots; slot++) {
        for (int32_t done = 0; done < place[slot + 1]; done += BLOCK_ROWS) {
            const int32_t left = place[slot + 1] - done;
            const Block block = {place[slot] + done, left < BLOCK_ROWS ? left : BLOCK_ROWS, (int32_t)slot};
            blocks[num_blocks++] = block;
        }
        place[slot + 1] += place[slot];
    }
    for (int64_t i = 0; i < c->rows; i++) {
        const int32_t slot = c->slots[i];
        if (slot >= 0 && slot < c->num_slots && c->ranks[slot] > 0) order[place[slot]++] = (int32_t)i;
    }
    return num_blocks;
}

static int add_low_rank(const LowRankCall *c, DovetailTurn do_turn) {
    char *scratch = (char *)(((uintptr_t)c->scratch + 63) / 64 * 64);
    float *inner = (float *)scratch;
    int32_t *order = (int32_t *)(scratch += in_lines(c->rows * c->num_parts * c->max_rank * 4));
    Block *blocks = (Block *)(scratch += in_lines(c->rows * 4));
    int32_t *place = (int32_t *)(scratch + in_lines(c->rows * (int64_t)sizeof(Block)));
    const int64_t num_blocks = make_blocks(c, order, blocks, place);
    if (!num_blocks) return 0;
    const Block last = blocks[num_blocks - 1];
    const int64_t per_rank = c->num_parts * c->in_features + c->out_features;
    const int64_t products = (last.first + last.count) * c->max_rank * per_rank;
    const int32_t threads = products < SERIAL_PRODUCTS ? 1 : c->threads;
    const int64_t rank_pieces = (c->max_rank + FEW_ROWS_RANKS - 1) / FEW_ROWS_RANKS * c->num_parts;
    const int64_t column_pieces = (c->out_features + TURN_COLUMNS - 1) / TURN_COLUMNS;
    LowRankLoop loop = {c, order, blocks, inner, rank_pieces, column_pieces, WHOLE_BLOCKS};
    if (threads == 1 || num_blocks >= BLOCKS_PER_THREAD * threads) {
        dovetail_share(do_turn, &loop, num_blocks, threads);
        return 0;
    }
    loop.pieces = OF_RANKS;
    dovetail_share(do_turn, &loop, num_blocks * rank_pieces, threads);
    loop.pieces = OF_COLUMNS;
    dovetail_share(do_turn, &loop, num_blocks * column_pieces, threads);
    return 0;
}

/* By the dtype of rows and that of adapters. */
int add_low_rank_f32_f32(const LowRankCall *c) { return add_low_rank(c, turn_f32_f32); }
int add_low_rank_f32_bf16(const LowRankCall *c) { return add_low_rank(c, turn_f32_bf16); }
int add_low_rank_f32_f16(const LowRankCall *c) { return add_low_rank(c, turn_f32_f16); }
int add_low_rank_bf16_bf16(const LowRankCall *c) { return add_low_rank(c, turn_bf16_bf16); }

/* That the instructions chosen run here, and give what plain loops give. */
static int gives_what_loops_give(const int a_dtype, int (*add)(const LowRankCall *)) {
    enum { ROWS = 7, IN = 21, OUT = 37, PARTS = 2, RANK = 9, SLOTS = 2 };
    enum { A = SLOTS * PARTS * RANK * IN, B = SLOTS * RANK * OUT };
    static float y[ROWS * OUT], x[ROWS * IN], wide[A + B], scratch[4096];
    static uint16_t narrow[A + B];
    const int32_t starts[PARTS + 1] = {0, 20, OUT}, ranks[SLOTS] = {RANK, 3}, slots[ROWS] = {1, 0, 0, -1, 0, 0, 0};
    if (scratch_bytes(ROWS, SLOTS, PARTS, RANK) > (int64_t)sizeof scratch) return 0;
    for (int i = 0; i < ROWS * OUT; i++) y[i] = 1;
    for (int i = 0; i < ROWS * IN; i++) x[i] = (float)(i % 11 - 5) / 4;
    for (int i = 0; i < A + B; i++) {
        wide[i] = (float)(i % 7 - 3) / 8;
        narrow[i] = a_dtype == F16 ? dovetail_to_float16(wide[i]) : dovetail_to_bfloat16(wide[i]);
    }
    const void *a = a_dtype == F32 ? (void *)wide : narrow, *b = a_dtype == F32 ? (void *)(wide + A) : narrow + A;
    const LowRankCall call = {y, x, a, b, starts, ranks, slots, scratch, ROWS, OUT, IN, SLOTS, PARTS, RANK, IN, OUT, 1};
    add(&call);
    for (int t = 0; t < ROWS; t++)
        for (int o = 0; o < OUT; o++) {
            double exact = 1;
            for (int r = 0; slots[t] >= 0 && r < ranks[slots[t]]; r++)
                for (int i = 0; i < IN; i++)
                    exact += (double)wide[A + (slots[t] * RANK + r) * OUT + o] * x[t * IN + i]
                        * wide[((slots[t] * PARTS + (o >= starts[1])) * RANK + r) * IN + i];
            if (!(fabs(y[t * OUT + o] - exact) <= 1e-5)) return 0;
        }
    return 1;
}

int self_test(void) {
    return !(gives_what_loops_give(F32, add_low_rank_f32_f32) && gives_what_loops_give(BF16, add_low_rank_f32_bf16)
             && gives_what_loops_give(F16, add_low_rank_f32_f16));
}
