/* Adds low-rank adapters (dovetail.contracts.operators.AddsLowRank) to float32 and bfloat16 rows.
 *
 * Rows are sorted by slot, and cut into blocks of one slot each. First the inner products h = a x of all rows go to
 * scratch memory, then h b is added to the outputs. Some rows and some ranks share the registers, but each number is
 * summed in an order that depends on the sizes alone, and by the same operations, so a row's bits are the same in any
 * batch: everything is computed in whole vectors, the ends of rows too, and the compiler fuses all products alike.
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
#define BLOCKS_PER_THREAD 4 /* with fewer, blocks are cut into several turns */

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
    int64_t turns_per_block;    /* 1, or the pieces that a block has */
    int64_t num_pieces;
} LowRankLoop;

/* ---- numbers ---- */

INLINE vec widened(const halves *narrow) {
#if defined(__AVX512F__)
    return (vec)((words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)narrow)) << 16);
#elif defined(__AVX2__)
    return (vec)((words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)narrow)) << 16);
#else
    return (vec)(__builtin_convertvector(*narrow, words) << 16);
#endif
}

/* The `count` elements from i on, and zeros behind them. */
INLINE vec load(const int is_bf16, const void *data, int64_t i, const int64_t count) {
    if (is_bf16) {
        if (count >= VL) return widened((const halves *)((const uint16_t *)data + i));
        halves narrow = {0};
        memcpy(&narrow, (const uint16_t *)data + i, 2 * (size_t)count);
        return widened(&narrow);
    }
    if (count >= VL) return *(const vec *)((const float *)data + i);
    vec x = {0};
    memcpy(&x, (const float *)data + i, 4 * (size_t)count);
    return x;
}

INLINE void store(const int is_bf16, void *data, int64_t i, const int64_t count, vec x) {
    if (!is_bf16) {
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

INLINE int64_t bytes_of(const int is_bf16) { return is_bf16 ? 2 : 4; }

INLINE float sum_of(vec x) {
#if VL == 16
    return _mm512_reduce_add_ps((__m512)x);
#else
    float part[VL];
    memcpy(part, &x, sizeof part);
    UNROLL for (int width = VL / 2; width > 0; width /= 2)
        UNROLL for (int i = 0; i < width; i++) part[i] += part[i + width];
    return part[0];
#endif
}

/* ---- the inner products ---- */

/* Elements that one step of a sum takes: what a register of the dtype holds. */
INLINE int64_t step_of(const int is_bf16) { return is_bf16 ? 2 * VL : VL; }

/* The elements of a step, zeros behind the first `count`; of bfloat16 those in even places apart from those in odd ones. */
INLINE void load_step(const int is_bf16, const void *data, int64_t i, const int64_t count, vec *to) {
    if (!is_bf16) {
        to[0] = load(0, data, i, count);
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

INLINE void shrink_step(const int is_bf16, const int T, const int R, const void *const *x, const char *a, int64_t stride,
                        int64_t i, const int64_t count, vec (*sum)[FEW_ROWS_RANKS]) {
    const int V = is_bf16 ? 2 : 1;
    vec own[TILE_ROWS][2], row[2];
    UNROLL for (int t = 0; t < T; t++) load_step(is_bf16, x[t], i, count, own[t]);
    UNROLL for (int r = 0; r < R; r++) {
        load_step(is_bf16, a + r * stride, i, count, row);
        UNROLL for (int t = 0; t < T; t++) UNROLL for (int v = 0; v < V; v++) sum[t][r] += own[t][v] * row[v];
    }
}

/* h[t][r] for T rows and R ranks. */
INLINE void shrink_tile(const int is_bf16, const int T, const int R, const void *const *x, const char *a, int64_t size,
                        float *const *h) {
    vec sum[TILE_ROWS][FEW_ROWS_RANKS];
    const int64_t stride = size * bytes_of(is_bf16), step = step_of(is_bf16);
    UNROLL for (int t = 0; t < T; t++) UNROLL for (int r = 0; r < R; r++) sum[t][r] = (vec){0};
    int64_t i = 0;
    for (; i + step <= size; i += step) shrink_step(is_bf16, T, R, x, a, stride, i, step, sum);
    if (i < size) shrink_step(is_bf16, T, R, x, a, stride, i, size - i, sum);
    UNROLL for (int t = 0; t < T; t++) UNROLL for (int r = 0; r < R; r++) h[t][r] = sum_of(sum[t][r]);
}

/* Ranks begin .. end - 1 of one part, of T rows. */
INLINE void shrink_ranks(const int is_bf16, const int T, const int R, const void *const *x, const char *a, int64_t size,
                         float *const *h, int64_t begin, int64_t end) {
    const int64_t stride = size * bytes_of(is_bf16);
    float *to[TILE_ROWS];
    int64_t r = begin;
    for (; r + R <= end; r += R) {
        UNROLL for (int t = 0; t < T; t++) to[t] = h[t] + r;
        shrink_tile(is_bf16, T, R, x, a + r * stride, size, to);
    }
    for (; r < end; r++) {
        UNROLL for (int t = 0; t < T; t++) to[t] = h[t] + r;
        shrink_tile(is_bf16, T, 1, x, a + r * stride, size, to);
    }
}

/* Piece p of a block: FEW_ROWS_RANKS ranks of one part. */
INLINE void shrink_piece(const int is_bf16, const LowRankLoop *loop, const Block *block, int64_t piece) {
    const LowRankCall *c = loop->c;
    const int64_t per_part = (c->max_rank + FEW_ROWS_RANKS - 1) / FEW_ROWS_RANKS;
    const int64_t part = piece / per_part, begin = piece % per_part * FEW_ROWS_RANKS;
    int64_t end = c->ranks[block->slot];
    if (end > begin + FEW_ROWS_RANKS) end = begin + FEW_ROWS_RANKS;
    const int64_t size = c->in_features, width = bytes_of(is_bf16);
    const char *a = (const char *)c->a + (block->slot * c->num_parts + part) * c->max_rank * size * width;
    const void *x[BLOCK_ROWS];
    float *h[BLOCK_ROWS];
    for (int i = 0; i < block->count; i++) {
        x[i] = (const char *)c->x + loop->order[block->first + i] * c->x_stride * width;
        h[i] = loop->inner + ((block->first + i) * c->num_parts + part) * c->max_rank;
    }
    int i = 0;
#if TILE_ROWS > 2
    for (; i + TILE_ROWS <= block->count; i += TILE_ROWS)
        shrink_ranks(is_bf16, TILE_ROWS, TILE_RANKS, x + i, a, size, h + i, begin, end);
#endif
    for (; i + 2 <= block->count; i += 2) shrink_ranks(is_bf16, 2, TILE_RANKS, x + i, a, size, h + i, begin, end);
    for (; i < block->count; i++) shrink_ranks(is_bf16, 1, FEW_ROWS_RANKS, x + i, a, size, h + i, begin, end);
}

/* ---- their way to the outputs ---- */

/* Columns column .. column + count - 1 of T rows, V vectors of them: count is V * VL, or less where V is 1. */
INLINE void expand_tile(const int is_bf16, const int T, const int V, char *const *y, const char *b, int64_t stride,
                        const float *const *h, int64_t rank, int64_t column, const int64_t count) {
    vec sum[TILE_ROWS][TILE_VECTORS];
    UNROLL for (int t = 0; t < T; t++) UNROLL for (int v = 0; v < V; v++) sum[t][v] = (vec){0};
    for (int64_t r = 0; r < rank; r++) {
        vec row[TILE_VECTORS];
        UNROLL for (int v = 0; v < V; v++) row[v] = load(is_bf16, b + r * stride, column + v * VL, count - v * VL);
        UNROLL for (int t = 0; t < T; t++) UNROLL for (int v = 0; v < V; v++) sum[t][v] += h[t][r] * row[v];
    }
    UNROLL for (int t = 0; t < T; t++)
        UNROLL for (int v = 0; v < V; v++) {
            const int64_t place = column + v * VL, left = count - v * VL;
            store(is_bf16, y[t], place, left, load(is_bf16, y[t], place, left) + sum[t][v]);
        }
}

/* Columns begin .. end - 1, all of one part, of T rows. */
INLINE void expand_columns(const int is_bf16, const int T, char *const *y, const char *b, int64_t stride,
                           const float *const *h, int64_t rank, int64_t begin, int64_t end) {
    for (; begin + TILE_COLUMNS <= end; begin += TILE_COLUMNS)
        expand_tile(is_bf16, T, TILE_VECTORS, y, b, stride, h, rank, begin, TILE_COLUMNS);
    for (; begin + VL <= end; begin += VL) expand_tile(is_bf16, T, 1, y, b, stride, h, rank, begin, VL);
    if (begin < end) expand_tile(is_bf16, T, 1, y, b, stride, h, rank, begin, end - begin);
}

/* Piece p of a block: TURN_COLUMNS columns, or what there is of them, in each part. */
INLINE void expand_piece(const int is_bf16, const LowRankLoop *loop, const Block *block, int64_t piece) {
    const LowRankCall *c = loop->c;
    const int64_t width = bytes_of(is_bf16), stride = c->out_features * width;
    const char *b = (const char *)c->b + block->slot * c->max_rank * stride;
    for (int64_t part = 0; part < c->num_parts; part++) {
        int64_t begin = piece * TURN_COLUMNS, end = begin + TURN_COLUMNS;
        if (begin < c->part_starts[part]) begin = c->part_starts[part];
        if (end > c->part_starts[part + 1]) end = c->part_starts[part + 1];
        if (begin >= end) continue;
        char *y[BLOCK_ROWS];
        const float *h[BLOCK_ROWS];
        for (int i = 0; i < block->count; i++) {
            y[i] = (char *)c->y + loop->order[block->first + i] * c->y_stride * width;
            h[i] = loop->inner + ((block->first + i) * c->num_parts + part) * c->max_rank;
        }
        const int64_t rank = c->ranks[block->slot];
        int i = 0;
#if TILE_ROWS > 2
        for (; i + TILE_ROWS <= block->count; i += TILE_ROWS)
            expand_columns(is_bf16, TILE_ROWS, y + i, b, stride, h + i, rank, begin, end);
#endif
        for (; i + 2 <= block->count; i += 2) expand_columns(is_bf16, 2, y + i, b, stride, h + i, rank, begin, end);
        for (; i < block->count; i++) expand_columns(is_bf16, 1, y + i, b, stride, h + i, rank, begin, end);
    }
}

/* ---- turns ---- */

#define PIECES_OF(turn, loop, block, piece)                                                                   \
    const Block *block = &(loop)->blocks[(turn) / (loop)->turns_per_block];                                   \
    const int is_whole = (loop)->turns_per_block == 1;                                                        \
    const int64_t one = (turn) % (loop)->turns_per_block;                                                     \
    for (int64_t piece = is_whole ? 0 : one; piece < (is_whole ? (loop)->num_pieces : one + 1); piece++)

#define TURN(name, step, is_bf16)                                                                             \
    static void name(const void *argument, int64_t turn, int32_t thread) {                                    \
        const LowRankLoop *loop = argument;                                                                   \
        (void)thread;                                                                                         \
        PIECES_OF(turn, loop, block, piece) step(is_bf16, loop, block, piece);                                \
    }

TURN(shrink_turn_f32, shrink_piece, 0)
TURN(shrink_turn_bf16, shrink_piece, 1)
TURN(expand_turn_f32, expand_piece, 0)
TURN(expand_turn_bf16, expand_piece, 1)

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

static void run(LowRankLoop *loop, DovetailTurn do_turn, int64_t num_blocks, int64_t num_pieces, int64_t products) {
    const LowRankCall *c = loop->c;
    const int32_t threads = products < SERIAL_PRODUCTS ? 1 : c->threads;
    loop->num_pieces = num_pieces;
    loop->turns_per_block = threads > 1 && num_blocks < BLOCKS_PER_THREAD * threads ? num_pieces : 1;
    dovetail_share(do_turn, loop, num_blocks * loop->turns_per_block, threads);
}

static int add_low_rank(const LowRankCall *c, DovetailTurn shrink, DovetailTurn expand) {
    char *scratch = (char *)(((uintptr_t)c->scratch + 63) / 64 * 64);
    float *inner = (float *)scratch;
    int32_t *order = (int32_t *)(scratch += in_lines(c->rows * c->num_parts * c->max_rank * 4));
    Block *blocks = (Block *)(scratch += in_lines(c->rows * 4));
    int32_t *place = (int32_t *)(scratch + in_lines(c->rows * (int64_t)sizeof(Block)));
    const int64_t num_blocks = make_blocks(c, order, blocks, place);
    if (!num_blocks) return 0;
    const Block last = blocks[num_blocks - 1];
    const int64_t per_feature = (last.first + last.count) * c->max_rank;
    LowRankLoop loop = {c, order, blocks, inner, 1, 1};
    const int64_t rank_pieces = (c->max_rank + FEW_ROWS_RANKS - 1) / FEW_ROWS_RANKS;
    run(&loop, shrink, num_blocks, c->num_parts * rank_pieces, per_feature * c->num_parts * c->in_features);
    const int64_t column_pieces = (c->out_features + TURN_COLUMNS - 1) / TURN_COLUMNS;
    run(&loop, expand, num_blocks, column_pieces, per_feature * c->out_features);
    return 0;
}

int add_low_rank_call_f32(const LowRankCall *c) { return add_low_rank(c, shrink_turn_f32, expand_turn_f32); }

int add_low_rank_call_bf16(const LowRankCall *c) { return add_low_rank(c, shrink_turn_bf16, expand_turn_bf16); }

/* That the instructions chosen run here, and give what plain loops give. */
int self_test(void) {
    enum { ROWS = 7, IN = 21, OUT = 37, PARTS = 2, RANK = 9, SLOTS = 2 };
    static float y[ROWS * OUT], x[ROWS * IN], a[SLOTS * PARTS * RANK * IN], b[SLOTS * RANK * OUT], scratch[4096];
    const int32_t starts[PARTS + 1] = {0, 20, OUT}, ranks[SLOTS] = {RANK, 3}, slots[ROWS] = {1, 0, 0, -1, 0, 0, 0};
    if (scratch_bytes(ROWS, SLOTS, PARTS, RANK) > (int64_t)sizeof scratch) return 1;
    for (int i = 0; i < ROWS * OUT; i++) y[i] = 1;
    for (int i = 0; i < ROWS * IN; i++) x[i] = (float)(i % 11 - 5) / 4;
    for (int i = 0; i < SLOTS * PARTS * RANK * IN; i++) a[i] = (float)(i % 7 - 3) / 8;
    for (int i = 0; i < SLOTS * RANK * OUT; i++) b[i] = (float)(i % 5 - 2) / 8;
    const LowRankCall call = {y, x, a, b, starts, ranks, slots, scratch, ROWS, OUT, IN, SLOTS, PARTS, RANK, IN, OUT, 1};
    add_low_rank_call_f32(&call);
    for (int t = 0; t < ROWS; t++)
        for (int o = 0; o < OUT; o++) {
            double exact = 1;
            for (int r = 0; slots[t] >= 0 && r < ranks[slots[t]]; r++)
                for (int i = 0; i < IN; i++)
                    exact += (double)b[(slots[t] * RANK + r) * OUT + o] * x[t * IN + i]
                        * a[((slots[t] * PARTS + (o >= starts[1])) * RANK + r) * IN + i];
            if (!(fabs(y[t * OUT + o] - exact) <= 1e-5)) return 1;
        }
    return 0;
}
