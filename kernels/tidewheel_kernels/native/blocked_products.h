/* Products of few rows with floats in oneDNN's packed layout: blocks of outputs side by side. */
#pragma once

#include "lanes.h"

/* A 32-bit lane holds PAIR successive inputs of its output. FEW rows by WIDE vectors of sums stay in registers. */
enum { PAIR = sizeof(int32_t) / sizeof(element), FEW = 4, WEIGHTS_AHEAD = 4096 / sizeof(element) };
#if defined __AVX512F__
enum { WIDE = 4 };
#else
enum { WIDE = 1 };
#endif
enum { WIDE_OUTPUTS = WIDE * LANES };

typedef struct {
    const element *weights; /* [num_blocks, padded_inputs / PAIR, block, PAIR] */
    int64_t num_outputs, num_inputs, padded_inputs, block;
} BlockedMatrix;

/* Add the products of each lane with PAIR inputs at `x`. */
INLINE floats add_products(floats sum, ints lanes, const element *x) {
#if defined ELEMENT_FLOAT32
    return sum + (floats)lanes * *x;
#elif defined __AVX512BF16__
    int32_t inputs;
    memcpy(&inputs, x, sizeof inputs);
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)lanes, (__m512bh)_mm512_set1_epi32(inputs));
#else
    return sum + (floats)(lanes << 16) * load(x[0]) + (floats)(lanes & (int32_t)0xffff0000) * load(x[1]);
#endif
}

INLINE void multiply_few(
    const BlockedMatrix *w, const element *weights, const element *x, int64_t x_stride,
    float out[FEW][WIDE_OUTPUTS], const int num_rows, const int num_vectors) {
    floats sum[FEW][WIDE];
    for (int r = 0; r < num_rows; r++)
        for (int c = 0; c < num_vectors; c++) sum[r][c] = (floats){0};
    for (int64_t k = 0; k < w->num_inputs; k += PAIR, weights += w->block * PAIR) {
        ints lanes[WIDE];
        for (int c = 0; c < num_vectors; c++) {
            lanes[c] = *(const ints *)(weights + c * LANES * PAIR);
            __builtin_prefetch(weights + c * LANES * PAIR + WEIGHTS_AHEAD);
        }
        for (int r = 0; r < num_rows; r++)
            for (int c = 0; c < num_vectors; c++) sum[r][c] = add_products(sum[r][c], lanes[c], x + r * x_stride + k);
    }
    for (int r = 0; r < num_rows; r++)
        for (int c = 0; c < num_vectors; c++) *(floats *)(out[r] + c * LANES) = sum[r][c];
}

#define FEW_ROWS(rows, vectors) \
    case 10 * rows + vectors: multiply_few(w, weights, x, x_stride, out, rows, vectors); break;
#define ALL_ROWS(vectors) FEW_ROWS(1, vectors) FEW_ROWS(2, vectors) FEW_ROWS(3, vectors) FEW_ROWS(4, vectors)

static void multiply_any_few(
    const BlockedMatrix *w, const element *weights, const element *x, int64_t x_stride,
    float out[FEW][WIDE_OUTPUTS], int64_t num_rows, int64_t num_vectors) {
    switch (10 * num_rows + num_vectors) {
        ALL_ROWS(1)
#if defined __AVX512F__
        ALL_ROWS(2)
        ALL_ROWS(3)
        ALL_ROWS(4)
#endif
    }
}

INLINE int64_t blocked_tiles(const BlockedMatrix *w) {
    int64_t num_blocks = (w->num_outputs + w->block - 1) / w->block;
    return num_blocks * ((w->block + WIDE_OUTPUTS - 1) / WIDE_OUTPUTS);
}

INLINE int64_t first_of_tile(const BlockedMatrix *w, int64_t tile) {
    int64_t per_block = (w->block + WIDE_OUTPUTS - 1) / WIDE_OUTPUTS;
    return tile / per_block * w->block + tile % per_block * WIDE_OUTPUTS;
}

/* The last tiles may reach past the last output. */
INLINE int64_t width_of_tile(const BlockedMatrix *w, int64_t tile) {
    int64_t left = w->block - first_of_tile(w, tile) % w->block;
    return left < WIDE_OUTPUTS ? left : WIDE_OUTPUTS;
}

/* A tile's outputs of all rows. */
INLINE void blocked_outputs(
    const BlockedMatrix *w, const element *x, int64_t x_stride, const element *bias, element *out, int64_t num_rows,
    int64_t tile) {
    int64_t first = first_of_tile(w, tile), width = width_of_tile(w, tile), within = first % w->block;
    int64_t left = w->num_outputs - first < width ? w->num_outputs - first : width;
    const element *weights = w->weights + (first - within) * w->padded_inputs + within * PAIR;
    for (int64_t row = 0; row < num_rows && left > 0; row += FEW) {
        int64_t count = num_rows - row < FEW ? num_rows - row : FEW;
        float sums[FEW][WIDE_OUTPUTS];
        multiply_any_few(w, weights, x + row * x_stride, x_stride, sums, count, (left + LANES - 1) / LANES);
        for (int64_t r = 0; r < count; r++)
            for (int64_t i = 0; i < left; i++)
                out[(row + r) * w->num_outputs + first + i] =
                    round_to_element(sums[r][i] + (bias ? load(bias[first + i]) : 0.0f));
    }
}
