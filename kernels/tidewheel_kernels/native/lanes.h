/* Vectors of 32-bit lanes, on processors with narrower ones too: outputs lie side by side in the lanes. */
#pragma once

#include "element.h"

#if defined __x86_64__
#include <immintrin.h>
#endif

/* As many lanes as a register has: compilers keep wider vectors in memory. */
#if defined __AVX512F__
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif
enum { VECTOR_BYTES = 4 * LANES };
enum { L2 = 2 }; /* locality of a prefetch: fetching into the first cache holds up other loads */

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* gcc keeps arrays of sums in registers only if loops over them are unrolled. */
#define UNROLLED _Pragma("GCC unroll 8")

typedef int32_t ints __attribute__((vector_size(VECTOR_BYTES), aligned(4)));
typedef float floats __attribute__((vector_size(VECTOR_BYTES), aligned(4)));

/* Return sum + a * b, rounded once where the processor can: a compiler chooses by the code around, so that a row's
   sums would depend on the number of rows beside it. */
INLINE floats multiply_add(floats sum, floats a, floats b) {
#if defined __AVX512F__
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined __FMA__
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return sum + a * b;
#endif
}

#if defined __AVX512F__
#define JOINED(numbers, how, of, i) (numbers) _mm512_##how((__m512i)of[2 * i], (__m512i)of[2 * i + 1])
#define QUARTERS(numbers, of, i, which) \
    (numbers) _mm512_shuffle_i32x4((__m512i)of[2 * i], (__m512i)of[2 * i + 1], which)

INLINE __mmask16 first_lanes(int64_t count) { return count < LANES ? (1 << count) - 1 : 0xffff; }

/* Return the sums of LANES vectors. */
#define SUMS_OF(name, numbers) \
    INLINE numbers name(const numbers r[LANES]) { \
        numbers x[8], y[4], z[2]; \
        for (int i = 0; i < 8; i++) \
            x[i] = JOINED(numbers, unpacklo_epi32, r, i) + JOINED(numbers, unpackhi_epi32, r, i); \
        for (int i = 0; i < 4; i++) \
            y[i] = JOINED(numbers, unpacklo_epi64, x, i) + JOINED(numbers, unpackhi_epi64, x, i); \
        for (int i = 0; i < 2; i++) z[i] = QUARTERS(numbers, y, i, 0x88) + QUARTERS(numbers, y, i, 0xdd); \
        return QUARTERS(numbers, z, 0, 0x88) + QUARTERS(numbers, z, 0, 0xdd); \
    }
SUMS_OF(sums_of, floats)
SUMS_OF(integer_sums_of, ints)
#endif
