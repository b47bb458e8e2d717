/* Numbers of 16 and 8 bits, and vectors of floats with an exponential. Plain C with the vector types of GCC and clang. */

#ifndef DOVETAIL_PAGED_CPU_NUMBERS_H
#define DOVETAIL_PAGED_CPU_NUMBERS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

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

INLINE uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

INLINE float float_of(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

INLINE float from_bfloat16(uint16_t h) { return float_of((uint32_t)h << 16); }

INLINE uint16_t to_bfloat16(float x) {
    uint32_t u = bits_of(x);
    uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return (u & 0x7fffffff) > 0x7f800000 ? (u >> 16) | 0x40 : rounded;
}

#if defined(__F16C__)
INLINE float from_float16(uint16_t h) { return _cvtsh_ss(h); }
INLINE uint16_t to_float16(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
#else
INLINE float from_float16(uint16_t h) {
    uint32_t magnitude = h & 0x7fff, sign = (uint32_t)(h & 0x8000) << 16;
    /* Moves the exponent's bias by a product, which is right for subnormal numbers too. */
    uint32_t finite = bits_of(float_of(magnitude << 13) * 0x1p112f);
    uint32_t special = (magnitude << 13) | 0x7f800000;
    return float_of(sign | (magnitude >= 0x7c00 ? special : finite));
}

INLINE uint16_t to_float16(float x) {
    uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000;
    u &= 0x7fffffff;
    /* The sum with 0.5 leaves a multiple of the smallest subnormal number, rounded to nearest even. */
    uint32_t subnormal = bits_of(float_of(u) + 0.5f) - 0x3f000000;
    uint32_t normal = (u - 0x38000000 + 0xfff + ((u >> 13) & 1)) >> 13;
    uint32_t special = u > 0x7f800000 ? 0x7e00 : 0x7c00;
    return sign | (u >= 0x47800000 ? special : u < 0x38800000 ? subnormal : normal);
}
#endif

/* Element i of an array; an int8 comes without its scale. */
INLINE float read_number(const int dtype, const void *data, int64_t i) {
    switch (dtype) {
    case BFLOAT16: return from_bfloat16(((const uint16_t *)data)[i]);
    case FLOAT16: return from_float16(((const uint16_t *)data)[i]);
    case INT8: return ((const int8_t *)data)[i];
    default: return ((const float *)data)[i];
    }
}

INLINE void write_number(const int dtype, void *data, int64_t i, float x) {
    switch (dtype) {
    case BFLOAT16: ((uint16_t *)data)[i] = to_bfloat16(x); break;
    case FLOAT16: ((uint16_t *)data)[i] = to_float16(x); break;
    case INT8: ((int8_t *)data)[i] = (int8_t)x; break;
    default: ((float *)data)[i] = x;
    }
}

/* VL float16 numbers. Compilers do not find the instruction for it by themselves. */
INLINE vec vec_from_float16(const uint16_t *h) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)h));
#elif defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)h));
#else
    vec x;
    for (int i = 0; i < VL; i++) x[i] = from_float16(h[i]);
    return x;
#endif
}

/* Elements i .. i + count - 1 of an array. */
INLINE void read_numbers(const int dtype, const void *data, int64_t i, const int count, float *to) {
    int j = 0;
    if (dtype == FLOAT16)
        for (; j + VL <= count; j += VL) *(vec *)(to + j) = vec_from_float16((const uint16_t *)data + i + j);
    for (; j < count; j++) to[j] = read_number(dtype, data, i + j);
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

/* exp(x) for x <= 88, to about 1e-7; 0 below -87, NaN for NaN. Polynomial of Cephes' expf. */
INLINE vec exp_vec(vec x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, held in the low bits */
    ivec is_tiny = x < splat(-87.0f);
    vec shifted = x * 1.44269504f + magic;
    vec n = shifted - magic;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
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
