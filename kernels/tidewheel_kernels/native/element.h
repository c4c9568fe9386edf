/* Element type of activations and caches: float32 or bfloat16, chosen by -D. Arithmetic is float32.
   All functions are inlined into loops that the compiler vectorises. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
/* Of a function that several files call: its copies might order sums differently, and so round differently. */
#define COMPILED_ONCE __attribute__((noinline, noclone))

#define LOWEST -1e30f /* below every logit, but finite: differences are not NaN */
#define LEAST 0x1p-100f /* magnitude whose reciprocal is finite */

enum { MAX_HEAD_DIM = 256, LARGEST = 127 /* of codes of 8 bits */ };

INLINE float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

#if defined ELEMENT_BFLOAT16
typedef uint16_t element;

INLINE float load(element x) { return from_bits((uint32_t)x << 16); }

/* Round to nearest, ties to even. */
INLINE element round_to_element(float x) {
    uint32_t bits = to_bits(x);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (element)(x == x ? rounded : 0x7fc0);
}
#elif defined ELEMENT_FLOAT32
typedef float element;

INLINE float load(element x) { return x; }
INLINE element round_to_element(float x) { return x; }
#else
#error "choose ELEMENT_FLOAT32 or ELEMENT_BFLOAT16"
#endif

/* Return the largest magnitude of a row; NaN unless all are finite. */
INLINE float largest_of(const element *row, int64_t width) {
    uint32_t most = 0; /* bits order magnitudes, and those of what is not finite come last */
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < width; i++) {
        uint32_t bits = to_bits(load(row[i])) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return most < 0x7f800000 ? from_bits(most) : NAN;
}

/* Round to an integer of magnitude up to `most`; NaN becomes one too. */
INLINE int32_t round_within(float x, int32_t most) {
    x = rintf(x);
    x = x > -most ? x : -most;
    return x < most ? x : most;
}

/* e^x to about 2 units in the last place, without a call, so that loops are vectorised: a power of two times the
   polynomial of Cephes' expf. x is clamped to [-87, 88]. */
INLINE float fast_exp(float x) {
    x = -87.0f > x ? -87.0f : x;
    x = 88.0f < x ? 88.0f : x;
    float power = rintf(x * 1.44269504f);
    float r = x - power * 0.693359375f + power * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return (p * r * r + r + 1.0f) * from_bits((uint32_t)((int32_t)power + 127) << 23);
}

INLINE float fast_tanh(float x) { return 1.0f - 2.0f / (fast_exp(2.0f * x) + 1.0f); }
