/* Linear layers over weights in groups: y = x W^T with 2 to 6 or 8 bits a weight and one scale per 16 or 32 of them.
 * What the bits say is an integer, or, in formats with a table, which of 16 integers is meant.
 *
 * Activations are rounded to int8 with one scale per 32 of a row (as GGML's Q8_0 blocks are), products are summed as
 * integers within a group, and groups are summed in float32.
 *
 * Layout: NR output rows stand side by side in a tile, so that one vector lane serves one row and nothing is summed
 * across lanes. A tile is a run of blocks of 32 input features, each block:
 *   scales     float16 [32 / group][NR], or, where scales take one byte, uint8: powers of two, as E8M0 of the OCP
 *              microscaling formats has them, halved
 *   minimums   float16 [32 / group][NR], where the format has them: w = scale * q + minimum
 *   quants     with 8 bits: int8 [8][NR][4], byte k of row r in vector v is feature 4 v + k. Otherwise up to two of
 *     fours    uint8 [4][NR][4], the lowest 4 bits, where there are 4 or more: byte k of row r in vector v holds
 *              feature 4 v + k (low half) and feature 16 + 4 v + k (high half)
 *     twos     uint8 [2][NR][4], the next 2 bits, with 2, 3 and 6 bits: bits 2 j and 2 j + 1 of byte (r, k) of plane p
 *              are those of feature 16 p + 4 j + k
 *     ones     uint8 [NR][4], the highest bit, with 3 and 5 bits: bit i of byte (r, k) is that of feature 4 i + k
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <dovetail/numbers.h>
#include <dovetail/team.h>

#if defined(__x86_64__) && !defined(PORTABLE)
#include <immintrin.h>
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && !defined(PORTABLE)
#define NR 16
#else
#define NR 8
#endif

#define BLOCK 32
#define MAX_TILE_ROWS 8
#define MAX_TILES 2
/* With fewer rows than this, memory is waited for, not the multiplier: one tile after the other reads it in a line. */
#define ROWS_FOR_TILES 16
/* How many bytes ahead a single row of activations asks for weights: with so little work per byte, the processor's own
 * prefetching, which stops at each page, leaves memory waiting. */
#define AHEAD 4096
#define ROWS_AT_ONCE 192
/* Pairs of tiles that a thread takes at a time: at most so many, and fewer where that would be less than so many times. */
#define PAIRS_PER_TURN 4
#define TURNS_PER_THREAD 6
#define inline_always DOVETAIL_INLINE

typedef float vf __attribute__((vector_size(NR * 4)));
typedef int32_t vi __attribute__((vector_size(NR * 4)));
typedef uint8_t vb __attribute__((vector_size(NR * 4)));
typedef uint16_t vh_wide __attribute__((vector_size(NR * 4)));

/* One matrix, or one part of a fused one. Mirrored by ctypes in kernel.py. */
typedef struct {
    const uint8_t *data;
    int64_t rows;
    int64_t first_row; /* where its outputs go */
    int32_t bits, group, has_min, zero; /* without minimums, w = scale * (q - zero) */
    int32_t scale_bytes, has_table;
    int8_t table[16]; /* with a table, w = scale * table[q] */
} Segment;

/* Where results go, and what is added to them. */
typedef struct {
    void *y; /* [M][N] */
    int64_t N;
    const void *bias; /* [N], or NULL */
    int32_t is_bf16, bias_is_bf16;
} Output;

/* ---- float16, bfloat16 ---- */

inline_always vf load_halves(const uint8_t *p) {
    vf f;
    dovetail_floats_from_float16(p, &f, NR);
    return f;
}

/* E8M0 without its bias, halved: 2^(e - 128), of which the two smallest are no normal numbers. */
inline_always int32_t exponent_bits(uint8_t e) { return e < 2 ? 0x200000 << e : (int32_t)(e - 1) << 23; }

inline_always vi load_bytes_wide(const uint8_t *p) {
#if NR == 16
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__) && !defined(PORTABLE)
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    vi wide;
    for (int i = 0; i < NR; i++) wide[i] = p[i];
    return wide;
#endif
}

inline_always vf load_exponents(const uint8_t *p) {
    vi e = load_bytes_wide(p), is_small = e < 2;
    return (vf)((is_small & (0x200000 << (e & 1))) | (~is_small & ((e - 1) << 23)));
}

inline_always vf load_scales(const uint8_t *p, int scale_bytes) {
    return scale_bytes == 1 ? load_exponents(p) : load_halves(p);
}

inline_always float load_float(const void *x, int64_t i, int is_bf16) {
    return is_bf16 ? dovetail_from_bfloat16(((const uint16_t *)x)[i]) : ((const float *)x)[i];
}

inline_always void store_float(void *y, int64_t i, float f, int is_bf16) {
    if (is_bf16) ((uint16_t *)y)[i] = dovetail_to_bfloat16(f);
    else ((float *)y)[i] = f;
}

/* ---- the dot product of four int8 with four weights in each lane ---- */

inline_always vb load_bytes(const uint8_t *p) {
    vb v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* Keeps the compiler from gathering the sums of a whole block at its end, for which there are too few registers. */
#if NR == 16
#define IN_PLACE(v) __asm__("" : "+v"(v))
#elif defined(__AVX2__) && !defined(PORTABLE)
#define IN_PLACE(v) __asm__("" : "+x"(v))
#else
#define IN_PLACE(v) (void)0
#endif

inline_always vi spread(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return (vi){} + four;
}

#if NR == 16
#define WIDE_SUMS 1
inline_always vi dot(vi sum, vb w, vi x) {
    sum = (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
    IN_PLACE(sum);
    return sum;
}
inline_always vi widened(vi sum) { return sum; }
#elif defined(__AVXVNNI__) && !defined(PORTABLE)
#define WIDE_SUMS 1
inline_always vi dot(vi sum, vb w, vi x) {
    sum = (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
    IN_PLACE(sum);
    return sum;
}
inline_always vi widened(vi sum) { return sum; }
#elif defined(__AVX2__) && !defined(PORTABLE)
/* Sums of pairs in int16, of up to 6 bits a weight: 8 products of 15 * 127 + 15 * 127 fit, or 4 with 5 bits, 2 with 6. */
#define WIDE_SUMS 0
inline_always vi dot(vi sum, vb w, vi x) {
    sum = (vi)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)w, (__m256i)x));
    IN_PLACE(sum);
    return sum;
}
inline_always vi widened(vi sum) { return (vi)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)); }
#else
#define WIDE_SUMS 1
inline_always vi dot(vi sum, vb w, vi x) {
    vi words = (vi)w;
    for (int k = 0; k < 4; k++) sum += ((words >> (8 * k)) & 255) * ((x << (24 - 8 * k)) >> 24);
    return sum;
}
inline_always vi widened(vi sum) { return sum; }
#endif

/* Weights of 8 bits are signed. Where the processor only multiplies unsigned by signed, they are moved by 128, and
 * SIGNED_ZERO takes that back. Those of tables are signed too, and the table is moved already. */
#if NR == 16 || (defined(__AVXVNNI__) && !defined(PORTABLE))
#define SIGNED_ZERO 128
inline_always vi dot_moved(vi sum, vb w, vi x) { return dot(sum, w, x); }
#elif defined(__AVX2__) && !defined(PORTABLE)
#define SIGNED_ZERO 0
inline_always vi dot_moved(vi sum, vb w, vi x) {
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), _mm256_sign_epi8((__m256i)x, (__m256i)w));
    sum = (vi)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    IN_PLACE(sum);
    return sum;
}
#else
#define SIGNED_ZERO 0
inline_always vi dot_moved(vi sum, vb w, vi x) {
    vi words = (vi)w;
    for (int k = 0; k < 4; k++) sum += ((words << (24 - 8 * k)) >> 24) * ((x << (24 - 8 * k)) >> 24);
    return sum;
}
#endif

inline_always vi dot_signed(vi sum, vb w, vi x) { return dot_moved(sum, w ^ SIGNED_ZERO, x); }

/* A table in each 16 bytes, moved as its weights are multiplied. */
inline_always vb spread_table(const int8_t *table) {
    vb all;
    for (int i = 0; i < NR * 4; i++) all[i] = (uint8_t)table[i % 16] ^ SIGNED_ZERO;
    return all;
}

inline_always vb look_up(vb table, vb index) {
#if NR == 16
    return (vb)_mm512_shuffle_epi8((__m512i)table, (__m512i)index);
#elif defined(__AVX2__) && !defined(PORTABLE)
    return (vb)_mm256_shuffle_epi8((__m256i)table, (__m256i)index);
#else
    vb found;
    for (int i = 0; i < NR * 4; i++) found[i] = table[index[i]];
    return found;
#endif
}

/* ---- activations ---- */

/* Rows that one call of a kernel takes stand together, block by block: R = 4 of them, and what is left at the end. */
typedef struct {
    int8_t *values; /* [M / R][K / 32][R][32] */
    float *scales;  /* [M / R][K / 32][R] */
    float *sums;    /* [M / R][K / 32][R][2]: scale times the sum of 16 values */
} Activations;

/* Activations are rounded eight at a time, whatever NR is. */
typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));

inline_always f8 load_eight(const void *x, int64_t i, int is_bf16) {
    if (is_bf16) {
        h8 halves;
        memcpy(&halves, (const uint16_t *)x + i, sizeof halves);
        return (f8)(__builtin_convertvector(halves, i8) << 16);
    }
    f8 eight;
    memcpy(&eight, (const float *)x + i, sizeof eight);
    return eight;
}

inline_always int32_t sum_of(i8 v) {
    int32_t sum = 0;
    for (int i = 0; i < 8; i++) sum += v[i];
    return sum;
}

inline_always void store_bytes(int8_t *to, const i8 *integers) {
#if defined(__AVX2__) && !defined(PORTABLE)
    __m256i low = _mm256_packs_epi32((__m256i)integers[0], (__m256i)integers[1]);
    __m256i high = _mm256_packs_epi32((__m256i)integers[2], (__m256i)integers[3]);
    /* Both halves of a vector are packed by themselves, so fours of bytes come out of order. */
    __m256i packed = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)to, packed);
#else
    for (int i = 0; i < BLOCK; i++) to[i] = (int8_t)integers[i / 8][i % 8];
#endif
}

inline_always void round_row(const void *x, int64_t row, int64_t M, int64_t K, int is_bf16, const Activations *to) {
    const int64_t R = row < M / 4 * 4 ? 4 : M % 4, first = row / 4 * 4;
    for (int64_t b = 0; b < K / BLOCK; b++) {
        const int64_t at = first * (K / BLOCK) + b * R + (row - first), from = row * K + b * BLOCK;
        f8 v[4];
        i8 greatest = {};
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            v[j] = load_eight(x, from + 8 * j, is_bf16);
            /* Magnitudes have the same order as integers, with infinity and NaN above all. */
            i8 size = (i8)v[j] & INT32_MAX, is_greater = size > greatest;
            greatest = (size & is_greater) | (greatest & ~is_greater);
        }
        int32_t most = 0;
        for (int i = 0; i < 8; i++) most = greatest[i] > most ? greatest[i] : most;
        float largest;
        memcpy(&largest, &most, sizeof largest);
        /* A row with NaN or infinity must not come out as numbers: all of its outputs are NaN, infinity's too. */
        const int finite = largest <= 3.4e38f;
        const float scale = finite ? largest / 127.0f : NAN, inverse = finite && largest > 1e-30f ? 127.0f / largest : 0.0f;
        i8 integers[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            /* Adding 1.5 * 2^23 rounds to nearest, ties to even, and leaves the integer in the low bits. */
            const f8 shifted = v[j] * inverse + 12582912.0f;
            integers[j] = finite ? (i8)shifted - 0x4b400000 : (i8){};
        }
        store_bytes(to->values + at * BLOCK, integers);
        to->scales[at] = scale;
        to->sums[2 * at] = scale * (float)sum_of(integers[0] + integers[1]);
        to->sums[2 * at + 1] = scale * (float)sum_of(integers[2] + integers[3]);
    }
}

/* ---- one tile of NR outputs for M rows ---- */

inline_always int scales_bytes(int group, int has_min, int scale_bytes) {
    return NR * (BLOCK / group) * (scale_bytes + 2 * has_min);
}

inline_always int64_t block_bytes(int bits, int group, int has_min, int scale_bytes) {
    return scales_bytes(group, has_min, scale_bytes) + NR * (int64_t)(4 * bits);
}

/* Where the planes of two bits and of one bit begin. */
inline_always int twos_at(int bits) { return bits > 4 ? 16 * NR : 0; }
inline_always int ones_at(int bits) { return twos_at(bits) + (bits & 2 ? 8 * NR : 0); }

/* Bits `from` and on of each byte of a plane, as bits `to` and on. */
inline_always vb moved(const uint8_t *plane, int from, int to, int mask) {
    vh_wide bits = (vh_wide)load_bytes(plane);
    return (vb)(from > to ? bits >> (from - to) : bits << (to - from)) & (uint8_t)(mask << to);
}

/* The two vectors of weights that vector v of `fours` holds; with 8 bits, vectors 2 v and 2 v + 1. */
inline_always void unpack_pair(const uint8_t *quants, int bits, int v, vb *first, vb *second) {
    if (bits == 8) {
        *first = load_bytes(quants + 2 * v * NR * 4);
        *second = load_bytes(quants + (2 * v + 1) * NR * 4);
        return;
    }
    *first = *second = (vb){};
    if (bits >= 4) {
        vb fours = load_bytes(quants + v * NR * 4);
        *first = fours & 15;
        *second = (vb)((vh_wide)fours >> 4) & 15;
    }
    if (bits & 2) {
        const uint8_t *twos = quants + twos_at(bits);
        *first |= moved(twos, 2 * v, bits > 4 ? 4 : 0, 3);
        *second |= moved(twos + NR * 4, 2 * v, bits > 4 ? 4 : 0, 3);
    }
    if (bits & 1) {
        *first |= moved(quants + ones_at(bits), v, bits - 1, 1);
        *second |= moved(quants + ones_at(bits), 4 + v, bits - 1, 1);
    }
}

/* Up to four rows of activations that stand together, from some block on. */
typedef struct {
    const int8_t *values;
    const float *scales, *sums;
} Rows;

inline_always Rows rows_from(const Activations *x, int64_t row, int64_t K) {
    return (Rows){x->values + row * K, x->scales + row * (K / BLOCK), x->sums + 2 * row * (K / BLOCK)};
}

inline_always void next_block(Rows *rows, int count) {
    rows->values += count * BLOCK, rows->scales += count, rows->sums += 2 * count;
}

/* One block of T tiles, `tile_bytes` apart, added to the sums of M rows: those of x[0], and behind four those of x[1].
 */
inline_always void multiply_block(const uint8_t *data, int64_t tile_bytes, const Rows *x, int M, int T, vb table,
                                  vf sums[][MAX_TILE_ROWS],
                                  int bits, int group, int has_min, int zero, int scale_bytes, int has_table) {
    const int scale_sets = BLOCK / group, is_signed = bits == 8 || has_table;
    vi first[MAX_TILES][MAX_TILE_ROWS], second[MAX_TILES][MAX_TILE_ROWS];
    vi narrow_first[MAX_TILES][MAX_TILE_ROWS], narrow_second[MAX_TILES][MAX_TILE_ROWS];
    for (int t = 0; t < T; t++)
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
            first[t][m] = second[t][m] = narrow_first[t][m] = narrow_second[t][m] = (vi){};
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
        vb one[MAX_TILES], two[MAX_TILES];
        for (int t = 0; t < T; t++) {
            const uint8_t *quants = data + t * tile_bytes + scales_bytes(group, has_min, scale_bytes);
            unpack_pair(quants, bits, v, &one[t], &two[t]);
            if (has_table) one[t] = look_up(table, one[t]), two[t] = look_up(table, two[t]);
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const int8_t *four = x[m / 4].values + m % 4 * BLOCK + (bits == 8 ? 8 : 4) * v;
            vi low = spread(four);
            for (int t = 0; t < T; t++) {
                if (bits == 8) first[t][m] = dot_signed(first[t][m], one[t], low);
                else if (has_table) first[t][m] = dot_moved(first[t][m], one[t], low);
                else narrow_first[t][m] = dot(narrow_first[t][m], one[t], low);
            }
            vi high = spread(four + (bits == 8 ? 4 : 16));
            for (int t = 0; t < T; t++) {
                if (bits == 8) first[t][m] = dot_signed(first[t][m], two[t], high);
                else if (has_table && group == BLOCK) first[t][m] = dot_moved(first[t][m], two[t], high);
                else if (has_table) second[t][m] = dot_moved(second[t][m], two[t], high);
                else if (group == BLOCK) narrow_first[t][m] = dot(narrow_first[t][m], two[t], high);
                else narrow_second[t][m] = dot(narrow_second[t][m], two[t], high);
            }
        }
        /* Before 16 bits overflow; where sums are wide, once at the end. */
        if (!is_signed && (v == 3 || (!WIDE_SUMS && bits > 4 && v == 1))) {
            for (int t = 0; t < T; t++)
#pragma GCC unroll 8
                for (int m = 0; m < M; m++) {
                    first[t][m] += widened(narrow_first[t][m]);
                    narrow_first[t][m] = (vi){};
                    if (group != BLOCK) {
                        second[t][m] += widened(narrow_second[t][m]);
                        narrow_second[t][m] = (vi){};
                    }
                }
        }
    }
    for (int t = 0; t < T; t++) {
        const uint8_t *scales = data + t * tile_bytes;
        const uint8_t *minimums = scales + NR * scale_sets * scale_bytes;
        vf scale = load_scales(scales, scale_bytes), scale_two = {}, minimum = {}, minimum_two = {};
        if (group != BLOCK) scale_two = load_scales(scales + NR * scale_bytes, scale_bytes);
        if (has_min) minimum = load_halves(minimums);
        if (has_min && group != BLOCK) minimum_two = load_halves(minimums + 2 * NR);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const float of_x = x[m / 4].scales[m % 4], *of_sums = x[m / 4].sums + 2 * (m % 4);
            float sum = group == BLOCK ? of_sums[0] + of_sums[1] : of_sums[0];
            vf total = sums[t][m];
            total += __builtin_convertvector(first[t][m], vf) * (scale * of_x);
            if (group != BLOCK) total += __builtin_convertvector(second[t][m], vf) * (scale_two * of_x);
            if (has_min) {
                total += minimum * sum;
                if (group != BLOCK) total += minimum_two * of_sums[1];
            } else if (zero) {
                total -= scale * ((float)zero * sum);
                if (group != BLOCK) total -= scale_two * ((float)zero * of_sums[1]);
            }
            sums[t][m] = total;
        }
    }
}

/* Sums of M rows over T tiles; M, T and all that stands in the last line of the parameters are constants where this is
 * inlined. Tiles that are multiplied together share what is loaded of the activations, and rows what is unpacked. */
inline_always void multiply_tiles(const uint8_t *data, int64_t K, const Activations *x, int64_t row, int M, int T,
                                  const int8_t *table, vf sums[][MAX_TILE_ROWS],
                                  int bits, int group, int has_min, int zero, int scale_bytes, int has_table) {
    const int64_t blocks = K / BLOCK, stride = block_bytes(bits, group, has_min, scale_bytes);
    const int below = M < 4 ? M : 4;
    if (bits == 8 || has_table) zero += SIGNED_ZERO;
    const vb spread_out = has_table ? spread_table(table) : (vb){};
    Rows rows[2] = {rows_from(x, row, K), rows_from(x, row + below, K)};
    for (int t = 0; t < T; t++)
        for (int m = 0; m < M; m++) sums[t][m] = (vf){};
    for (int64_t b = 0; b < blocks; b++, data += stride) {
        for (int64_t line = 0; T == 1 && line < stride; line += 64) __builtin_prefetch(data + AHEAD + line);
        multiply_block(data, blocks * stride, rows, M, T, spread_out, sums,
                       bits, group, has_min, zero, scale_bytes, has_table);
        next_block(&rows[0], below);
        next_block(&rows[1], M - below);
    }
}

inline_always void multiply_rows(const Segment *s, int64_t tile, int64_t K, const Activations *x, int64_t row, int M,
                                 int T, const Output *to,
                                 int bits, int group, int has_min, int zero, int scale_bytes, int has_table) {
    vf sums[MAX_TILES][MAX_TILE_ROWS];
    const uint8_t *data = s->data + tile * (K / BLOCK) * block_bytes(bits, group, has_min, scale_bytes);
    multiply_tiles(data, K, x, row, M, T, s->table, sums, bits, group, has_min, zero, scale_bytes, has_table);
    for (int t = 0; t < T; t++, tile++) {
        int64_t first = s->first_row + tile * NR;
        int64_t count = s->rows - tile * NR < NR ? s->rows - tile * NR : NR;
        for (int m = 0; m < M; m++) {
            int64_t at = (row + m) * to->N + first;
            if (count == NR && !to->is_bf16 && !to->bias) {
                memcpy((float *)to->y + at, &sums[t][m], sizeof sums[t][m]);
                continue;
            }
            for (int i = 0; i < count; i++) {
                float bias = to->bias ? load_float(to->bias, first + i, to->bias_is_bf16) : 0.0f;
                store_float(to->y, at + i, sums[t][m][i] + bias, to->is_bf16);
            }
        }
    }
}

/* Whether there are registers for the sums of eight rows within a block: with 16 of them, one for each row. */
inline_always int sums_fit(int bits, int group, int has_table) {
    return group == BLOCK && (bits <= 4 || bits == 8 || has_table);
}

/* Rows from .. end - 1 times one tile. */
inline_always void multiply_all(const Segment *s, int64_t tile, int64_t K, const Activations *x, int64_t from,
                                int64_t end, const Output *to,
                                int bits, int group, int has_min, int zero, int scale_bytes, int has_table) {
#define ROWS(M) multiply_rows(s, tile, K, x, from, M, 1, to, bits, group, has_min, zero, scale_bytes, has_table)
    if (sums_fit(bits, group, has_table)) {
        for (; from + 8 <= end; from += 8) ROWS(8);
        if (end - from == 6) ROWS(6), from += 6;
        else if (end - from == 5) ROWS(5), from += 5;
    }
    for (; from + 4 <= end; from += 4) ROWS(4);
    if (end - from == 3) ROWS(3);
    else if (end - from == 2) ROWS(2);
    else if (end - from == 1) ROWS(1);
#undef ROWS
}

typedef void (*Kernel)(const Segment *, int64_t, int64_t, int64_t, const Activations *, int64_t, int64_t, const Output *);

/* Tiles tile .. last - 1, at most MAX_TILES. The last of its parameters: bits, group, has_min, zero, scale_bytes,
 * has_table. */
#define KERNEL(name, ...)                                                                                            \
    static void name(const Segment *s, int64_t tile, int64_t last, int64_t K, const Activations *x, int64_t from,    \
                     int64_t end, const Output *to) {                                                                \
        if (last - tile == MAX_TILES && end - from >= ROWS_FOR_TILES)                                                \
            for (; from + 4 <= end; from += 4) multiply_rows(s, tile, K, x, from, 4, MAX_TILES, to, __VA_ARGS__);    \
        for (; tile < last; tile++) multiply_all(s, tile, K, x, from, end, to, __VA_ARGS__);                         \
    }

KERNEL(two_plain, 2, 32, 0, 1, 2, 0)
KERNEL(two_min, 2, 16, 1, 0, 2, 0)
KERNEL(three_plain, 3, 16, 0, 4, 2, 0)
KERNEL(four_plain, 4, 32, 0, 8, 2, 0)
KERNEL(four_min, 4, 32, 1, 0, 2, 0)
KERNEL(four_table, 4, 32, 0, 0, 2, 1)
KERNEL(four_small_table, 4, 16, 0, 0, 2, 1)
KERNEL(four_power_table, 4, 32, 0, 0, 1, 1)
KERNEL(five_plain, 5, 32, 0, 16, 2, 0)
KERNEL(five_min, 5, 32, 1, 0, 2, 0)
KERNEL(six_plain, 6, 16, 0, 32, 2, 0)
KERNEL(eight_plain, 8, 32, 0, 0, 2, 0)

static Kernel kernel_of(const Segment *s) {
    if (s->has_table) return s->scale_bytes == 1 ? four_power_table : s->group == 16 ? four_small_table : four_table;
    switch (s->bits) {
    case 2: return s->has_min ? two_min : two_plain;
    case 3: return three_plain;
    case 4: return s->has_min ? four_min : four_plain;
    case 5: return s->has_min ? five_min : five_plain;
    case 6: return six_plain;
    default: return eight_plain;
    }
}

/* ---- what Python calls ---- */

int32_t tile_rows(void) { return NR; }

int64_t packed_bytes(int64_t rows, int64_t K, int32_t bits, int32_t group, int32_t has_min, int32_t scale_bytes) {
    return (rows + NR - 1) / NR * (K / BLOCK) * block_bytes(bits, group, has_min, scale_bytes);
}

static int64_t pairs_of(const Segment *s) { return (s->rows + MAX_TILES * NR - 1) / (MAX_TILES * NR); }

/* One call of linear(), and the rows of x that its threads multiply now. */
typedef struct {
    const Segment *segments;
    const void *x;
    int64_t M, K, pairs, pairs_per_turn, from, end;
    const Activations *rounded;
    const Output *to;
} LinearLoop;

static void round_turn(const void *loop, int64_t row, int32_t thread) {
    const LinearLoop *l = loop;
    (void)thread;
    if (l->to->is_bf16) round_row(l->x, row, l->M, l->K, 1, l->rounded);
    else round_row(l->x, row, l->M, l->K, 0, l->rounded);
}

static void multiply_turn(const void *loop, int64_t turn, int32_t thread) {
    const LinearLoop *l = loop;
    (void)thread;
    int64_t first = turn * l->pairs_per_turn, stop = first + l->pairs_per_turn < l->pairs ? first + l->pairs_per_turn : l->pairs;
    for (int64_t p = first; p < stop; p++) {
        const Segment *s = l->segments;
        int64_t pair = p;
        while (pair >= pairs_of(s)) pair -= pairs_of(s++);
        int64_t tile = pair * MAX_TILES, last = tile + MAX_TILES, tiles = (s->rows + NR - 1) / NR;
        kernel_of(s)(s, tile, last < tiles ? last : tiles, l->K, l->rounded, l->from, l->end, l->to);
    }
}

/* y = x [M][K] W^T + bias, x in the dtype of y. Returns 0, or 1 where there was no memory for rounded activations. */
static int linear(const Segment *segments, int64_t num_segments, const void *x, int64_t M, int64_t K, const Output *to,
                  int threads) {
    static _Thread_local char *memory = NULL;
    static _Thread_local size_t capacity = 0;
    size_t values = (size_t)(M * K + 63) & ~(size_t)63, needed = values + (size_t)(M * K) / BLOCK * 3 * sizeof(float);
    if (needed > capacity) {
        free(memory);
        memory = aligned_alloc(64, (needed + 4095) & ~(size_t)4095);
        capacity = memory ? needed : 0;
        if (!memory) return 1;
    }
    Activations rounded = {(int8_t *)memory, (float *)(memory + values), (float *)(memory + values) + M * K / BLOCK};
    int64_t pairs = 0;
    for (int64_t i = 0; i < num_segments; i++) pairs += pairs_of(&segments[i]);
    if (M * K * pairs * MAX_TILES * NR <= 65536) threads = 1;
    int64_t per_turn = pairs / ((int64_t)threads * TURNS_PER_THREAD);
    per_turn = per_turn < 1 ? 1 : per_turn > PAIRS_PER_TURN ? PAIRS_PER_TURN : per_turn;
    LinearLoop loop = {segments, x, M, K, pairs, per_turn, 0, 0, &rounded, to};
    dovetail_share(round_turn, &loop, M, M > 4 ? threads : 1);
    for (int64_t from = 0; from < M; from += ROWS_AT_ONCE) {
        loop.from = from;
        loop.end = from + ROWS_AT_ONCE < M ? from + ROWS_AT_ONCE : M;
        dovetail_share(multiply_turn, &loop, (pairs + per_turn - 1) / per_turn, threads);
    }
    return 0;
}

/* Arguments of linear_call and lookup_call, mirrored in kernel.py. */
typedef struct {
    const Segment *segments;
    int64_t num_segments;
    const void *x;
    int64_t M, K;
    void *y;
    int64_t N;
    const void *bias;
    int32_t is_bf16, bias_is_bf16, threads;
} LinearCall;

typedef struct {
    const Segment *segment;
    const int64_t *ids;
    int64_t count, K;
    void *out;
    int32_t is_bf16, threads;
} LookupCall;

int linear_call(const LinearCall *c) {
    const Output to = {c->y, c->N, c->bias, c->is_bf16, c->bias_is_bf16};
    return linear(c->segments, c->num_segments, c->x, c->M, c->K, &to, c->threads);
}

/* Where the low bits, the two bits and the one bit of feature c of a block and row r of a tile stand: bytes and shifts.
 * With 8 bits, and with 2 and 3, there are no four bits. */
typedef struct { int low, fours_shift, twos, twos_shift, ones, ones_shift; } Place;

static Place place(int bits, int r, int c) {
    int k = c % 4, quad = c / 4, half = quad / 4;
    return (Place){
        ((bits == 8 ? quad : quad % 4) * NR + r) * 4 + k, 4 * half,
        twos_at(bits) + (half * NR + r) * 4 + k, 2 * (quad % 4),
        ones_at(bits) + r * 4 + k, quad,
    };
}

static void put_value(uint8_t *quants, int bits, int r, int c, int value) {
    const Place p = place(bits, r, c);
    if (bits == 8) { quants[p.low] = (uint8_t)value; return; }
    if (bits >= 4) quants[p.low] |= (value & 15) << p.fours_shift;
    if (bits & 2) quants[p.twos] |= (value >> (bits > 4 ? 4 : 0) & 3) << p.twos_shift;
    if (bits & 1) quants[p.ones] |= value >> (bits - 1) << p.ones_shift;
}

static int get_value(const uint8_t *quants, int bits, int r, int c) {
    const Place p = place(bits, r, c);
    if (bits == 8) return (int8_t)quants[p.low];
    int value = bits >= 4 ? quants[p.low] >> p.fours_shift & 15 : 0;
    if (bits & 2) value |= (quants[p.twos] >> p.twos_shift & 3) << (bits > 4 ? 4 : 0);
    if (bits & 1) value |= (quants[p.ones] >> p.ones_shift & 1) << (bits - 1);
    return value;
}

static float scale_at(const uint8_t *scales, int64_t i, int scale_bytes) {
    if (scale_bytes == 1) {
        int32_t bits = exponent_bits(scales[i]);
        float scale;
        memcpy(&scale, &bits, 4);
        return scale;
    }
    uint16_t half;
    memcpy(&half, scales + 2 * i, 2);
    return dovetail_from_float16(half);
}

/* One call of pack(). */
typedef struct {
    const uint8_t *values, *scales;
    const uint16_t *minimums;
    int64_t rows, K;
    int32_t bits, group, scale_bytes;
    uint8_t *data;
} PackLoop;

static void pack_tile(const void *loop, int64_t tile, int32_t thread) {
    const PackLoop *l = loop;
    const int has_min = l->minimums != NULL, sets = BLOCK / l->group, scale_bytes = l->scale_bytes;
    const int64_t stride = block_bytes(l->bits, l->group, has_min, scale_bytes), blocks = l->K / BLOCK;
    uint8_t *block = l->data + tile * blocks * stride;
    (void)thread;
    memset(block, 0, (size_t)(blocks * stride));
    for (int64_t b = 0; b < blocks; b++, block += stride) {
        uint8_t *of_minimums = block + NR * sets * scale_bytes;
        uint8_t *quants = block + scales_bytes(l->group, has_min, scale_bytes);
        for (int r = 0; r < NR && tile * NR + r < l->rows; r++) {
            int64_t row = tile * NR + r;
            for (int g = 0; g < sets; g++) {
                int64_t from = row * (l->K / l->group) + b * sets + g, to = g * NR + r;
                memcpy(block + scale_bytes * to, l->scales + scale_bytes * from, (size_t)scale_bytes);
                if (has_min) memcpy(of_minimums + 2 * to, l->minimums + from, 2);
            }
            const uint8_t *from = l->values + row * l->K + b * BLOCK;
            for (int c = 0; c < BLOCK; c++) put_value(quants, l->bits, r, c, from[c]);
        }
    }
}

/* Lays out rows: values uint8 [rows][K] (int8 with 8 bits), scales [rows][K / group] of float16 or one byte, minimums
 * float16 [rows][K / group]. Rows beyond the last up to a whole tile become zeros. */
void pack(const uint8_t *values, const uint8_t *scales, const uint16_t *minimums, int64_t rows, int64_t K,
          int32_t bits, int32_t group, int32_t scale_bytes, uint8_t *data, int32_t threads) {
    const PackLoop loop = {values, scales, minimums, rows, K, bits, group, scale_bytes, data};
    dovetail_share(pack_tile, &loop, (rows + NR - 1) / NR, threads);
}

static void look_up_row(const void *loop, int64_t i, int32_t thread) {
    const LookupCall *l = loop;
    const Segment *s = l->segment;
    const int sets = BLOCK / s->group, scale_bytes = s->scale_bytes, r = (int)(l->ids[i] % NR);
    const int64_t stride = block_bytes(s->bits, s->group, s->has_min, scale_bytes), blocks = l->K / BLOCK;
    const uint8_t *block = s->data + l->ids[i] / NR * blocks * stride;
    (void)thread;
    for (int64_t b = 0; b < blocks; b++, block += stride) {
        const uint8_t *minimums = block + NR * sets * scale_bytes;
        const uint8_t *quants = block + scales_bytes(s->group, s->has_min, scale_bytes);
        for (int c = 0; c < BLOCK; c++) {
            int at = c / s->group * NR + r, value = get_value(quants, s->bits, r, c);
            int number = s->has_table ? s->table[value] : value - s->zero;
            float minimum = s->has_min ? scale_at(minimums, at, 2) : 0.0f;
            float weight = scale_at(block, at, scale_bytes) * (float)number + minimum;
            store_float(l->out, i * l->K + b * BLOCK + c, weight, l->is_bf16);
        }
    }
}

/* Rows of a segment: ids int64 [count] -> out [count][K]. Returns 0, or 1 where the segment lacks one of the rows. */
int lookup_call(const LookupCall *c) {
    for (int64_t i = 0; i < c->count; i++)
        if (c->ids[i] < 0 || c->ids[i] >= c->segment->rows) return 1;
    dovetail_share(look_up_row, c, c->count, c->count > 16 ? c->threads : 1);
    return 0;
}

/* ---- every format against sums that are taken one by one ---- */

static int test_format(int bits, int group, int has_min, int zero, int scale_bytes, int has_table) {
    enum { K = 96, N = 27, M = 19 };
    static const int counts[] = {M, 14, 5}; /* tiles that are multiplied together and 3 rows; 8 and 6; 5 */
    static uint8_t values[N * K], data[1 << 16], scales[N * K / 16 * 2];
    static uint16_t minimums[N * K / 16];
    static float x[M * K], y[M * N], dense[N * K];
    static int64_t ids[N];
    uint32_t state = 1;
    for (int i = 0; i < N * K; i++) {
        state = state * 1664525u + 1013904223u;
        values[i] = (uint8_t)(state >> 24) & (bits == 8 ? 255 : (1 << bits) - 1);
    }
    for (int i = 0; i < N * K / 16; i++) {
        uint16_t half = (uint16_t)(0x2400 + i % 512);
        if (scale_bytes == 1) scales[i] = (uint8_t)(118 + i % 7);
        else memcpy(scales + 2 * i, &half, 2);
        minimums[i] = (uint16_t)(0xb000 + i % 999);
    }
    for (int i = 0; i < M * K; i++) state = state * 1664525u + 1013904223u, x[i] = (float)(int32_t)state * 1e-9f;
    for (int i = 0; i < N; i++) ids[i] = i;
    Segment s = {data, N, 0, bits, group, has_min, zero, scale_bytes, has_table, {0}};
    for (int i = 0; i < 16; i++) s.table[i] = (int8_t)(i * 16 - 127);
    if (packed_bytes(N, K, bits, group, has_min, scale_bytes) > (int64_t)sizeof data) return 1;
    pack(values, scales, has_min ? minimums : NULL, N, K, bits, group, scale_bytes, data, 1);
    const LookupCall all = {&s, ids, N, K, dense, 0, 1};
    if (lookup_call(&all)) return 1;
    const Output to = {y, N, NULL, 0, 0};
    for (int c = 0; c < 3; c++) {
        if (linear(&s, 1, x, counts[c], K, &to, 1)) return 1;
        for (int i = 0; i < counts[c] * N; i++) {
            const int m = i / N, n = i % N;
            double sum = 0, size = 0;
            for (int k = 0; k < K; k++) {
                int value = bits == 8 ? (int8_t)values[n * K + k] : values[n * K + k];
                int g = n * (K / group) + k / group, number = has_table ? s.table[value] : value - zero;
                double minimum = has_min ? dovetail_from_float16(minimums[g]) : 0;
                double w = scale_at(scales, g, scale_bytes) * (double)number + minimum;
                if (fabs(w - dense[n * K + k]) > 1e-5 * (1 + fabs(w))) return 2;
                sum += w * x[m * K + k];
                size += fabs(w) * 2.2;
            }
            /* Activations, which are less than 2.2, are off by half a step at most. */
            if (!(fabs(sum - y[m * N + n]) <= size / 254)) return 3;
        }
    }
    return 0;
}

int self_test(void) {
    return test_format(2, 32, 0, 1, 2, 0) || test_format(2, 16, 1, 0, 2, 0) || test_format(3, 16, 0, 4, 2, 0) ||
           test_format(4, 32, 0, 8, 2, 0) || test_format(4, 32, 1, 0, 2, 0) || test_format(4, 32, 0, 0, 2, 1) ||
           test_format(4, 16, 0, 0, 2, 1) || test_format(4, 32, 0, 0, 1, 1) || test_format(5, 32, 0, 16, 2, 0) ||
           test_format(5, 32, 1, 0, 2, 0) || test_format(6, 16, 0, 32, 2, 0) || test_format(8, 32, 0, 0, 2, 0);
}
