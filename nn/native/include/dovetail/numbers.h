/* Numbers of 16 bits, and the series of exp: what kernels share that `dovetail.nn.native` compiles.
 *
 * Plain C for GCC and clang; everything is inlined. Conversions give the same bits on every processor, but for the payload
 * of a NaN. A source that defines PORTABLE before it includes this does without the instructions of any one processor; one
 * that tells the compiler what to fuse does so before as well.
 */

#ifndef DOVETAIL_NUMBERS_H
#define DOVETAIL_NUMBERS_H

#include <stdint.h>
#include <string.h>

#if defined(__F16C__) && !defined(PORTABLE)
#include <immintrin.h>
#define DOVETAIL_F16C 1
#endif
/* Elsewhere on x86 the type is there as well, but converted by a call for each number. */
#if defined(__aarch64__) && defined(__FLT16_MAX__) && !defined(PORTABLE)
#define DOVETAIL_HAS_FLOAT16 1
#endif

#define DOVETAIL_INLINE static inline __attribute__((always_inline))

DOVETAIL_INLINE uint32_t dovetail_bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

DOVETAIL_INLINE float dovetail_float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* ---- bfloat16 ---- */

DOVETAIL_INLINE float dovetail_from_bfloat16(uint16_t h) { return dovetail_float_of((uint32_t)h << 16); }

/* To the nearest, ties to even, in the low 16 bits. Not for NaN, some of which it would make infinite. */
DOVETAIL_INLINE uint32_t dovetail_rounded_to_bfloat16(float x) {
    uint32_t bits = dovetail_bits_of(x);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

/* To the nearest, ties to even. NaN stays one, with its sign and what fits of its payload. */
DOVETAIL_INLINE uint16_t dovetail_to_bfloat16(float x) {
    uint32_t bits = dovetail_bits_of(x);
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : dovetail_rounded_to_bfloat16(x));
}

/* ---- float16 ---- */

#if defined(DOVETAIL_F16C)
DOVETAIL_INLINE float dovetail_from_float16(uint16_t h) { return _cvtsh_ss(h); }
DOVETAIL_INLINE uint16_t dovetail_to_float16(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
#elif defined(DOVETAIL_HAS_FLOAT16)
DOVETAIL_INLINE float dovetail_from_float16(uint16_t h) {
    _Float16 x;
    memcpy(&x, &h, 2);
    return (float)x;
}
DOVETAIL_INLINE uint16_t dovetail_to_float16(float x) {
    _Float16 narrow = (_Float16)x;
    uint16_t h;
    memcpy(&h, &narrow, 2);
    return h;
}
#else
DOVETAIL_INLINE float dovetail_from_float16(uint16_t h) {
    uint32_t magnitude = h & 0x7fff, sign = (uint32_t)(h & 0x8000) << 16;
    uint32_t normal = (magnitude << 13) + 0x38000000, special = (magnitude << 13) | 0x7f800000;
    /* By way of an integer: a subnormal float32 may count as zero. */
    uint32_t subnormal = dovetail_bits_of((float)(int32_t)magnitude * 0x1p-24f);
    return dovetail_float_of(sign | (magnitude >= 0x7c00 ? special : magnitude < 0x400 ? subnormal : normal));
}

/* To the nearest, ties to even; infinite beyond 65504. */
DOVETAIL_INLINE uint16_t dovetail_to_float16(float x) {
    uint32_t bits = dovetail_bits_of(x), sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    /* The sum with 0.5 leaves a multiple of the smallest subnormal number, rounded to nearest even. */
    uint32_t subnormal = dovetail_bits_of(dovetail_float_of(bits) + 0.5f) - 0x3f000000;
    uint32_t normal = (bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13;
    uint32_t special = bits > 0x7f800000 ? 0x7e00 : 0x7c00;
    return (uint16_t)(sign | (bits >= 0x47800000 ? special : bits < 0x38800000 ? subnormal : normal));
}
#endif

/* `count` float16 numbers at any address to float32 at any address. Compilers do not find the instruction for several
 * at once by themselves. */
DOVETAIL_INLINE void dovetail_floats_from_float16(const void *halves, void *floats, const int64_t count) {
    const char *from = (const char *)halves;
    char *to = (char *)floats;
    int64_t i = 0;
#if defined(DOVETAIL_F16C) && defined(__AVX512F__)
    for (; i + 16 <= count; i += 16)
        _mm512_storeu_ps(to + 4 * i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from + 2 * i))));
#endif
#if defined(DOVETAIL_F16C)
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps((float *)(to + 4 * i), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 2 * i))));
#endif
    for (; i < count; i++) {
        uint16_t h;
        memcpy(&h, from + 2 * i, 2);
        float x = dovetail_from_float16(h);
        memcpy(to + 4 * i, &x, 4);
    }
}

/* ---- exp ---- */

/* exp(r), but for 2e-7 of it, for |r| <= ln(2) / 2, by the polynomial of the Cephes library's expf, with exp(x) = 2^n exp(r)
 * for x = n ln(2) + r. A macro, so that r may be a float or a vector of floats, and multiply_add(a, b, c), which is
 * a * b + c, fused or not. */
#define DOVETAIL_EXP_SERIES(r, multiply_add)                                                         \
    (multiply_add(DOVETAIL_EXP_TERMS(r, multiply_add), (r) * (r), r) + 1.0f)
#define DOVETAIL_EXP_TERMS(r, multiply_add)                                                          \
    multiply_add(multiply_add(multiply_add(multiply_add(multiply_add(1.9875691500e-4f, r, 1.3981999507e-3f), r, \
                                                        8.3334519073e-3f), r, 4.1665795894e-2f), r,  \
                              1.6666665459e-1f), r, 5.0000001201e-1f)

#endif
