/* Products of few rows with floats in oneDNN's packed layout: blocks of outputs side by side. */
#pragma once

#include "lanes.h"

/* A 32-bit lane holds PAIR successive inputs of its output. FEW rows by WIDE vectors of sums stay in registers. */
enum { PAIR = sizeof(int32_t) / sizeof(element), WEIGHTS_AHEAD = 4096 / sizeof(element) };
#if defined __AVX512F__
enum { WIDE = 4, FEW = 6 };
#else
enum { WIDE = 1, FEW = 4 };
#endif
enum { WIDE_OUTPUTS = WIDE * LANES };

/* Rows of a block share a part of the weights in the first cache, while the next part is fetched. */
enum { MOST_ROWS = 64, PART_INPUTS = 16384 / (WIDE_OUTPUTS * sizeof(element)) };

typedef struct {
    const element *weights; /* [num_blocks, padded_inputs / PAIR, block, PAIR] */
    int64_t num_outputs, num_inputs, padded_inputs, block;
} BlockedMatrix;

/* Add the products of each lane with PAIR inputs at `x`. */
INLINE floats add_products(floats sum, ints lanes, const element *x) {
#if defined ELEMENT_FLOAT32
    return multiply_add(sum, (floats)lanes, (floats){0} + *x);
#elif defined __AVX512BF16__
    int32_t inputs;
    memcpy(&inputs, x, sizeof inputs);
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)lanes, (__m512bh)_mm512_set1_epi32(inputs));
#else
    sum = multiply_add(sum, (floats)(lanes << 16), (floats){0} + load(x[0]));
    return multiply_add(sum, (floats)(lanes & (int32_t)0xffff0000), (floats){0} + load(x[1]));
#endif
}

/* Part of the inputs, and which of all passes over it, of FEW rows each, it is: each fetches its share of the weights
   that lie `ahead`. */
typedef struct {
    int64_t first, end, pass, num_passes, ahead /* elements */;
} Part;

/* Add the products of a part to `total`; write them, if it `is_whole`: all inputs in one pass. */
INLINE void multiply_few(
    const BlockedMatrix *w, const element *weights, const element *x, int64_t x_stride, Part part,
    float total[][WIDE_OUTPUTS], const int num_rows, const int num_vectors, const int is_whole) {
    floats sum[FEW][WIDE];
    for (int r = 0; r < num_rows; r++)
        for (int c = 0; c < num_vectors; c++)
            sum[r][c] = is_whole ? (floats){0} : *(const floats *)(total[r] + c * LANES);
    weights += part.first * w->block;
    int64_t next_fetch = part.first + part.pass * PAIR;
    for (int64_t k = is_whole ? 0 : part.first; k < part.end; k += PAIR, weights += w->block * PAIR) {
        ints lanes[WIDE];
        for (int c = 0; c < num_vectors; c++) {
            lanes[c] = *(const ints *)(weights + c * LANES * PAIR);
            if (is_whole) __builtin_prefetch(weights + c * LANES * PAIR + WEIGHTS_AHEAD);
        }
        if (!is_whole && k == next_fetch) {
            for (int c = 0; c < num_vectors; c++) __builtin_prefetch(weights + c * LANES * PAIR + part.ahead);
            next_fetch += part.num_passes * PAIR;
        }
        for (int r = 0; r < num_rows; r++)
            for (int c = 0; c < num_vectors; c++) sum[r][c] = add_products(sum[r][c], lanes[c], x + r * x_stride + k);
    }
    for (int r = 0; r < num_rows; r++)
        for (int c = 0; c < num_vectors; c++) *(floats *)(total[r] + c * LANES) = sum[r][c];
}

#define FEW_ROWS(rows, vectors) \
    case 10 * rows + vectors: \
        if (part.num_passes == 1) \
            multiply_few(w, weights, x, x_stride, part, total, rows, vectors, 1); \
        else \
            multiply_few(w, weights, x, x_stride, part, total, rows, vectors, 0); \
        break;
#if defined __AVX512F__
#define MORE_ROWS(vectors) FEW_ROWS(5, vectors) FEW_ROWS(6, vectors)
#else
#define MORE_ROWS(vectors)
#endif
#define ALL_ROWS(vectors) \
    FEW_ROWS(1, vectors) FEW_ROWS(2, vectors) FEW_ROWS(3, vectors) FEW_ROWS(4, vectors) MORE_ROWS(vectors)

static void multiply_any_few(
    const BlockedMatrix *w, const element *weights, const element *x, int64_t x_stride, Part part,
    float total[][WIDE_OUTPUTS], int64_t num_rows, int64_t num_vectors) {
    switch (10 * num_rows + num_vectors) {
        ALL_ROWS(1)
#if defined __AVX512F__
        ALL_ROWS(2)
        ALL_ROWS(3)
        ALL_ROWS(4)
#endif
    }
}

/* Memory to fetch between passes, which leave it idle. */
typedef struct Fetches {
    void (*fetch_some)(struct Fetches *);
} Fetches;

INLINE int64_t passes_of(int64_t num_rows) { return (num_rows + FEW - 1) / FEW; }

/* Multiply at most MOST_ROWS rows: all of them by a part of the weights while it is in the first cache. */
INLINE void multiply_block(
    const BlockedMatrix *w, const element *weights, const element *x, int64_t x_stride, float total[][WIDE_OUTPUTS],
    int64_t num_rows, int64_t num_vectors, Fetches *fetches) {
    const int64_t num_passes = passes_of(num_rows), share = (num_rows + num_passes - 1) / num_passes;
    const int64_t length = num_passes > 1 ? (int64_t)PART_INPUTS : w->num_inputs;
    if (num_passes > 1) memset(total, 0, num_rows * sizeof *total);
    for (int64_t first = 0; first < w->num_inputs; first += length) {
        const int64_t end = first + length < w->num_inputs ? first + length : w->num_inputs;
        for (int64_t pass = 0, row = 0; row < num_rows; pass++, row += share) {
            const int64_t count = num_rows - row < share ? num_rows - row : share;
            const Part part = {first, end, pass, num_passes, length * w->block};
            if (fetches) fetches->fetch_some(fetches);
            multiply_any_few(w, weights, x + row * x_stride, x_stride, part, total + row, count, num_vectors);
        }
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

/* A tile's outputs of all rows. `fetches` may be NULL. */
INLINE void blocked_outputs(
    const BlockedMatrix *w, const element *x, int64_t x_stride, const element *bias, element *out, int64_t num_rows,
    int64_t tile, Fetches *fetches) {
    int64_t first = first_of_tile(w, tile), width = width_of_tile(w, tile), within = first % w->block;
    int64_t left = w->num_outputs - first < width ? w->num_outputs - first : width;
    const element *weights = w->weights + (first - within) * w->padded_inputs + within * PAIR;
    for (int64_t row = 0; row < num_rows && left > 0; row += MOST_ROWS) {
        int64_t count = num_rows - row < MOST_ROWS ? num_rows - row : MOST_ROWS;
        float total[MOST_ROWS][WIDE_OUTPUTS];
        multiply_block(w, weights, x + row * x_stride, x_stride, total, count, (left + LANES - 1) / LANES, fetches);
        for (int64_t r = 0; r < count; r++)
            for (int64_t i = 0; i < left; i++)
                out[(row + r) * w->num_outputs + first + i] =
                    round_to_element(total[r][i] + (bias ? load(bias[first + i]) : 0.0f));
    }
}
