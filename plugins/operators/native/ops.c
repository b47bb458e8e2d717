/* Operators between linear layers: dovetail.contracts.operators on float32 and bfloat16 rows.
 *
 * A row is computed by one thread, in an order that depends on its length alone, so its bits are the same in any batch.
 * Products and sums are fused only where FMA says so: a compiler that fuses as it likes may do it otherwise at the end
 * of a row than inside.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif

#ifdef __FP_FAST_FMAF
#define FMA(a, b, c) __builtin_fmaf(a, b, c)
#else
#define FMA(a, b, c) ((a) * (b) + (c))
#endif

#include <dovetail/numbers.h>
#include <dovetail/team.h>

/* Waking the other threads costs about as much as these many elements do in one. */
#define SERIAL_NORM 32768
#define SERIAL_SILU 8192
#define SERIAL_ROTATE 32768

typedef uint16_t bfloat16;

static inline float load_f32(float x) { return x; }

static inline float store_f32(float x) { return x; }

static inline float load_bf16(bfloat16 x) { return dovetail_from_bfloat16(x); }

/* Unlike dovetail_to_bfloat16, which keeps a NaN's payload, this makes every NaN the one that torch writes. */
static inline bfloat16 store_bf16(float x) { return (bfloat16)(x == x ? dovetail_rounded_to_bfloat16(x) : 0x7fc0); }

/* exp(x) within 2 units in the last place; below -87 and above 88 it stays at the value there. Only the series is shared
 * with other kernels: what is fused must be the same inside a row and at its end here, and nothing has to become zero. */
static inline float fast_exp(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    /* Adding and taking away 1.5 * 2^23 rounds to an integer. */
    float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    float r = FMA(n, -0.693359375f, x);
    r = FMA(n, 2.12194440e-4f, r);
    return DOVETAIL_EXP_SERIES(r, FMA) * dovetail_float_of((uint32_t)((int32_t)n + 127) << 23);
}

typedef float floats8 __attribute__((vector_size(32)));
typedef uint16_t shorts8 __attribute__((vector_size(16)));
typedef uint32_t words8 __attribute__((vector_size(32)));

#define LOAD8_f32(p, y) memcpy(&(y), (p), 32)
#define LOAD8_bf16(p, y)                                           \
    do {                                                           \
        shorts8 narrow;                                            \
        memcpy(&narrow, (p), 16);                                  \
        words8 wide = __builtin_convertvector(narrow, words8) << 16; \
        memcpy(&(y), &wide, 32);                                   \
    } while (0)

/* Arguments of the kernels that Python calls, mirrored in operators.py. */
typedef struct {
    void *out;
    const void *x;
    int64_t tokens, token_stride, num_heads, head_stride;
    const void *weight;
    int64_t size;
    float eps;
    int32_t threads;
} NormCall;

typedef struct {
    void *x, *residual;
    int64_t rows;
    const void *weight;
    int64_t size;
    float eps;
    int32_t threads;
} AddNormCall;

typedef struct {
    void *out;
    const void *gate_up;
    int64_t rows, n;
    int32_t threads;
} SiluCall;

typedef struct {
    void *x;
    int64_t tokens, token_stride, num_heads, head_stride;
    const void *cos, *sin;
    int64_t angle_stride, half;
    int32_t threads;
} RotateCall;

typedef struct {
    void *out;
    const void *table;
    const int64_t *ids;
    int64_t count, num_rows, row_bytes;
} TakeCall;

/* Rows of a table; 1 where an id lies outside it. */
int take_rows_call(const TakeCall *c) {
    for (int64_t i = 0; i < c->count; i++) {
        if (c->ids[i] < 0 || c->ids[i] >= c->num_rows) return 1;
        memcpy((char *)c->out + i * c->row_bytes, (const char *)c->table + c->ids[i] * c->row_bytes, c->row_bytes);
    }
    return 0;
}

/* Rows that a thread takes at a time. */
#define ROWS_PER_TURN 4
#define TURNS(rows) (((rows) + ROWS_PER_TURN - 1) / ROWS_PER_TURN)
#define ROWS_OF(turn, rows, row)                                                                             \
    for (int64_t row = (turn) * ROWS_PER_TURN; row < (rows) && row < ((turn) + 1) * ROWS_PER_TURN; row++)

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)

#define T float
#define T_NAME f32
#include "elementwise.h"
#undef T
#undef T_NAME

#define T bfloat16
#define T_NAME bf16
#include "elementwise.h"
#undef T
#undef T_NAME

#define T float
#define T_NAME f32
#define W float
#define W_NAME f32
#include "norms.h"
#undef T
#undef T_NAME

#define T bfloat16
#define T_NAME bf16
#include "norms.h"
#undef W
#undef W_NAME

#define W bfloat16
#define W_NAME bf16
#include "norms.h"

/* That the instructions chosen run here, and give what libm gives. */
int self_test(void) {
    enum { SIZE = 75 };
    float x[SIZE], weight[SIZE], normed[SIZE], gate_up[2 * SIZE], gated[SIZE];
    float sum = 0;
    for (int i = 0; i < SIZE; i++) {
        x[i] = gate_up[i] = (float)(i - 40) / 4;
        gate_up[SIZE + i] = weight[i] = 1.0f + (float)i / SIZE;
        sum += x[i] * x[i];
    }
    const NormCall norm_call = {normed, x, 1, SIZE, 1, SIZE, weight, SIZE, 1e-5f, 1};
    const SiluCall silu_call = {gated, gate_up, 1, SIZE, 1};
    rms_norm_call_f32_f32(&norm_call);
    silu_mul_call_f32(&silu_call);
    float scale = 1.0f / sqrtf(sum / SIZE + 1e-5f);
    for (int i = 0; i < SIZE; i++) {
        float norm = x[i] * scale * weight[i], silu = x[i] / (1 + expf(-x[i])) * weight[i];
        if (!(fabsf(normed[i] - norm) <= 1e-5f * fabsf(norm)) || !(fabsf(gated[i] - silu) <= 1e-5f * fabsf(silu)))
            return 1;
    }
    return 0;
}
