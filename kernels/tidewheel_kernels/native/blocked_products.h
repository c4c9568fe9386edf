/* Products of few rows with floats in oneDNN's packed layout: blocks of outputs side by side. */
#pragma once

#include "lanes.h"

/* A 32-bit lane holds PAIR successive inputs of its output. A tile has WIDE vectors of outputs. */
enum { PAIR = sizeof(int32_t) / sizeof(element), WIDE_OUTPUTS = 64, WIDE = WIDE_OUTPUTS / LANES };

/* Sums of at most FEW rows by vectors_per_pass(rows) vectors fit in registers. */
#if defined __AVX512F__
enum { FEW = 7, MOST_LONG_PASSES = 3 };
INLINE int64_t vectors_per_pass(int64_t num_rows) { return WIDE; }
#else
enum { FEW = 6, MOST_LONG_PASSES = 4 };
INLINE int64_t vectors_per_pass(int64_t num_rows) { return num_rows > 3 ? 2 : WIDE / num_rows; }
#endif

/* A tile is multiplied in passes over a part of its weights, each pass by some rows and some vectors. With at most
   MOST_LONG_PASSES, parts are long: the first pass reads from memory, the others from the second cache. With more,
   parts are short, to stay in the first cache, and each pass fetches its share of the next part. */
enum { MOST_ROWS = 64, TILE_INPUT_BYTES = WIDE_OUTPUTS * sizeof(element) };
enum { LONG_PART = 65536 / TILE_INPUT_BYTES, SHORT_PART = 16384 / TILE_INPUT_BYTES };

typedef struct {
    int64_t num_rows, num_vectors; /* of each pass */
    int64_t num_passes, part_inputs;
} Passes;

/* The passes for at most MOST_ROWS rows by at most WIDE vectors. */
INLINE Passes passes_of(int64_t num_rows, int64_t num_vectors) {
    int64_t row_passes = ceil_div(num_rows, FEW), rows_each = ceil_div(num_rows, row_passes);
    int64_t vectors_each = vectors_per_pass(rows_each);
    int64_t num_passes = row_passes * ceil_div(num_vectors, vectors_each);
    /* The first pass waits for memory: it multiplies as many rows as it can. */
    if (num_passes <= MOST_LONG_PASSES) return (Passes){FEW, vectors_each, num_passes, LONG_PART};
    return (Passes){rows_each, vectors_each, num_passes, SHORT_PART};
}

/* Fetch weights that are needed soon: with SLOW_ROWS or more further ahead, into the second cache. */
enum { SLOW_ROWS = 6, LINE_ELEMENTS = 64 / sizeof(element), LINES_PER_STEP = WIDE_OUTPUTS * PAIR / LINE_ELEMENTS };
INLINE void fetch_ahead(const element *weights, const int num_rows) {
    if (num_rows < SLOW_ROWS)
        __builtin_prefetch(weights + 4096 / sizeof(element));
    else
        __builtin_prefetch(weights + 8192 / sizeof(element), 0, L2);
}

typedef struct {
    const element *weights; /* [num_blocks, padded_inputs / PAIR, block, PAIR] */
    int64_t num_outputs, num_inputs, padded_inputs, block;
} BlockedMatrix;

/* Add the products of each lane with PAIR inputs at `x`. */
INLINE floats add_products(floats sum, ints weights, const element *x) {
#if defined ELEMENT_FLOAT32
    return multiply_add(sum, (floats)weights, (floats){0} + *x);
#elif defined __AVX512BF16__
    int32_t inputs;
    memcpy(&inputs, x, sizeof inputs);
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(inputs));
#else
    sum = multiply_add(sum, (floats)(weights << 16), (floats){0} + load(x[0]));
    return multiply_add(sum, (floats)(weights & (int32_t)0xffff0000), (floats){0} + load(x[1]));
#endif
}

/* A part's inputs [first, end), and the number of a pass over them. */
typedef struct {
    int64_t first, end, pass, num_passes;
} Part;

/* Add the products of a part to `total`. The first pass fetches weights ahead; or, if passes share fetches, each
   fetches some of the next part. */
INLINE void multiply_few(
    const BlockedMatrix *w, const element *weights, const element *x, int64_t x_stride, Part part, float *total,
    const int num_rows, const int num_vectors, const int shares_fetches) {
    floats sum[FEW][WIDE];
    UNROLLED for (int r = 0; r < num_rows; r++)
        UNROLLED for (int c = 0; c < num_vectors; c++)
            sum[r][c] = *(const floats *)(total + r * WIDE_OUTPUTS + c * LANES);
    weights += part.first * w->block;
    int64_t next_fetch = part.first + part.pass * PAIR;
    for (int64_t k = part.first; k < part.end; k += PAIR, weights += w->block * PAIR) {
        ints of_weights[WIDE];
        UNROLLED for (int c = 0; c < num_vectors; c++) of_weights[c] = *(const ints *)(weights + c * LANES * PAIR);
        if (!shares_fetches && part.pass == 0)
            for (int line = 0; line < LINES_PER_STEP; line++) fetch_ahead(weights + line * LINE_ELEMENTS, num_rows);
        if (shares_fetches && k == next_fetch) {
            for (int line = 0; line < LINES_PER_STEP; line++)
                __builtin_prefetch(weights + line * LINE_ELEMENTS + SHORT_PART * w->block);
            next_fetch += part.num_passes * PAIR;
        }
        UNROLLED for (int r = 0; r < num_rows; r++)
            UNROLLED for (int c = 0; c < num_vectors; c++)
                sum[r][c] = add_products(sum[r][c], of_weights[c], x + r * x_stride + k);
    }
    UNROLLED for (int r = 0; r < num_rows; r++)
        UNROLLED for (int c = 0; c < num_vectors; c++) *(floats *)(total + r * WIDE_OUTPUTS + c * LANES) = sum[r][c];
}

#define PASS_OF(rows, vectors) \
    case 10 * rows + vectors: \
        if (part.num_passes > MOST_LONG_PASSES) \
            multiply_few(w, weights, x, x_stride, part, total, rows, vectors, 1); \
        else \
            multiply_few(w, weights, x, x_stride, part, total, rows, vectors, 0); \
        break;
#define ROWS_3_TO_6(vectors) PASS_OF(3, vectors) PASS_OF(4, vectors) PASS_OF(5, vectors) PASS_OF(6, vectors)
#define ROWS_1_TO_7(vectors) PASS_OF(1, vectors) PASS_OF(2, vectors) ROWS_3_TO_6(vectors) PASS_OF(7, vectors)
#define VECTORS_1_TO_4(rows) PASS_OF(rows, 1) PASS_OF(rows, 2) PASS_OF(rows, 3) PASS_OF(rows, 4)

INLINE void multiply_any_few(
    const BlockedMatrix *w, const element *weights, const element *x, int64_t x_stride, Part part, float *total,
    int64_t num_rows, int64_t num_vectors) {
    switch (10 * num_rows + num_vectors) { /* all that passes_of gives */
#if defined __AVX512F__
        ROWS_1_TO_7(1)
        ROWS_1_TO_7(2)
        ROWS_1_TO_7(3)
        ROWS_1_TO_7(4)
#else
        VECTORS_1_TO_4(1)
        PASS_OF(1, 5)
        PASS_OF(1, 6)
        PASS_OF(1, 7)
        PASS_OF(1, 8)
        VECTORS_1_TO_4(2)
        ROWS_3_TO_6(1)
        ROWS_3_TO_6(2)
#endif
    }
}

/* Callbacks of a product with adapters. */
typedef struct Extras {
    /* Add to the sums of a block of `num_rows` rows from `row` on. */
    void (*add_to_sums)(struct Extras *, float total[][WIDE_OUTPUTS], int64_t row, int64_t num_rows);
    void (*fetch_some)(struct Extras *); /* between passes, most of which leave memory idle; or NULL */
} Extras;

/* Multiply at most MOST_ROWS rows: all of them by a part of the weights before the next part. */
INLINE void multiply_block(
    const BlockedMatrix *w, const element *weights, const element *x, int64_t x_stride, float total[][WIDE_OUTPUTS],
    int64_t num_rows, int64_t num_vectors, Extras *extras) {
    const Passes p = passes_of(num_rows, num_vectors);
    memset(total, 0, num_rows * sizeof *total);
    for (int64_t first = 0; first < w->num_inputs; first += p.part_inputs) {
        Part part = {first, least(first + p.part_inputs, w->num_inputs), 0, p.num_passes};
        for (int64_t row = 0; row < num_rows; row += p.num_rows)
            for (int64_t v = 0; v < num_vectors; v += p.num_vectors, part.pass++) {
                if (extras && extras->fetch_some) extras->fetch_some(extras);
                multiply_any_few(
                    w, weights + v * LANES * PAIR, x + row * x_stride, x_stride, part, total[row] + v * LANES,
                    least(num_rows - row, p.num_rows), least(num_vectors - v, p.num_vectors));
            }
    }
}

INLINE int64_t blocked_tiles(const BlockedMatrix *w) {
    return ceil_div(w->num_outputs, w->block) * ceil_div(w->block, WIDE_OUTPUTS);
}

INLINE int64_t first_of_tile(const BlockedMatrix *w, int64_t tile) {
    int64_t per_block = ceil_div(w->block, WIDE_OUTPUTS);
    return tile / per_block * w->block + tile % per_block * WIDE_OUTPUTS;
}

/* The last tiles may reach past the last output. */
INLINE int64_t width_of_tile(const BlockedMatrix *w, int64_t tile) {
    int64_t left = w->block - first_of_tile(w, tile) % w->block;
    return left < WIDE_OUTPUTS ? left : WIDE_OUTPUTS;
}

/* A tile's outputs of all rows. `extras` may be NULL. */
INLINE void blocked_outputs(
    const BlockedMatrix *w, const element *x, int64_t x_stride, const element *bias, element *out, int64_t num_rows,
    int64_t tile, Extras *extras) {
    int64_t first = first_of_tile(w, tile), width = width_of_tile(w, tile), within = first % w->block;
    int64_t left = w->num_outputs - first < width ? w->num_outputs - first : width;
    const element *weights = w->weights + (first - within) * w->padded_inputs + within * PAIR;
    for (int64_t row = 0; row < num_rows && left > 0; row += MOST_ROWS) {
        int64_t count = num_rows - row < MOST_ROWS ? num_rows - row : MOST_ROWS;
        float total[MOST_ROWS][WIDE_OUTPUTS];
        multiply_block(w, weights, x + row * x_stride, x_stride, total, count, ceil_div(left, LANES), extras);
        if (extras) extras->add_to_sums(extras, total, row, count);
        for (int64_t r = 0; r < count; r++)
            for (int64_t i = 0; i < left; i++)
                out[(row + r) * w->num_outputs + first + i] =
                    round_to_element(total[r][i] + (bias ? load(bias[first + i]) : 0.0f));
    }
}
