/* Numbers by their dtype, and vectors of floats with an exponential. Plain C with the vector types of GCC and clang. */

#ifndef DOVETAIL_PAGED_CPU_NUMBERS_H
#define DOVETAIL_PAGED_CPU_NUMBERS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <dovetail/numbers.h>

#define INLINE DOVETAIL_INLINE

/* Keep in step with DTYPES in kernels.py. */
enum { FLOAT32, BFLOAT16, FLOAT16, INT8 };

#if defined(__AVX512F__)
#define VL 16
#elif defined(__AVX__)
#define VL 8
#else
#define VL 4
#endif

typedef float vec __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(VL * 4), aligned(4), may_alias));

/* Element i of an array; an int8 comes without its scale. */
INLINE float read_number(const int dtype, const void *data, int64_t i) {
    switch (dtype) {
    case BFLOAT16: return dovetail_from_bfloat16(((const uint16_t *)data)[i]);
    case FLOAT16: return dovetail_from_float16(((const uint16_t *)data)[i]);
    case INT8: return ((const int8_t *)data)[i];
    default: return ((const float *)data)[i];
    }
}

INLINE void write_number(const int dtype, void *data, int64_t i, float x) {
    switch (dtype) {
    case BFLOAT16: ((uint16_t *)data)[i] = dovetail_to_bfloat16(x); break;
    case FLOAT16: ((uint16_t *)data)[i] = dovetail_to_float16(x); break;
    case INT8: ((int8_t *)data)[i] = (int8_t)x; break;
    default: ((float *)data)[i] = x;
    }
}

/* Elements i .. i + count - 1 of an array. */
INLINE void read_numbers(const int dtype, const void *data, int64_t i, const int count, float *to) {
    if (dtype == FLOAT16) {
        dovetail_floats_from_float16((const uint16_t *)data + i, to, count);
        return;
    }
    for (int j = 0; j < count; j++) to[j] = read_number(dtype, data, i + j);
}

/* The same where the compiler does not know the dtype. */
static void read_any_numbers(int dtype, const void *data, int64_t i, int count, float *to) {
    switch (dtype) {
    case BFLOAT16: read_numbers(BFLOAT16, data, i, count, to); break;
    case FLOAT16: read_numbers(FLOAT16, data, i, count, to); break;
    case INT8: read_numbers(INT8, data, i, count, to); break;
    default: read_numbers(FLOAT32, data, i, count, to);
    }
}

INLINE int64_t bytes_of(int dtype) { return dtype == FLOAT32 ? 4 : dtype == INT8 ? 1 : 2; }

INLINE vec splat(float x) { return x - (vec){0}; }

INLINE vec select_vec(ivec where, vec yes, vec no) { return (vec)((where & (ivec)yes) | (~where & (ivec)no)); }

#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c)) /* the compiler fuses it where it can */

/* exp(x) for x <= 88, to about 1e-7; 0 below -87, so that hidden keys weigh nothing, and NaN for NaN. */
INLINE vec exp_vec(vec x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, held in the low bits */
    ivec is_tiny = x < splat(-87.0f);
    vec shifted = x * 1.44269504f + magic;
    vec n = shifted - magic;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec y = DOVETAIL_EXP_SERIES(r, MULTIPLY_ADD);
    return (vec)(((ivec)y + ((ivec)shifted << 23)) & ~is_tiny);
}

INLINE vec tanh_vec(vec x) {
    ivec is_negative = x < splat(0);
    vec magnitude = select_vec(is_negative, -x, x);
    vec e = exp_vec(magnitude * -2.0f);
    vec y = (1.0f - e) / (1.0f + e);
    return select_vec(is_negative, -y, y);
}

INLINE float sum_of(vec x) {
    float sum = 0;
    for (int i = 0; i < VL; i++) sum += x[i];
    return sum;
}

#endif
