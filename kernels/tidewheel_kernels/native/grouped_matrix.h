/* Product of rows with a matrix of 4- or 8-bit integers. Weights share a scale (and a minimum) by output and group of
   inputs; inputs are rounded to 8 bits with a scale by row and group, so that products are of integers. */
#pragma once

#include "lanes.h"

/* OUTPUTS outputs lie side by side, in 32-bit lanes; a lane holds PER_LANE bytes of inputs. */
enum { GROUP = 32, OUTPUTS = 32, PER_LANE = 4, TILE_VECTORS = 2, TILE_OUTPUTS = TILE_VECTORS * LANES };

typedef struct {
    const uint8_t *codes;     /* [num_outputs / OUTPUTS, num_inputs * bits / 32, OUTPUTS, PER_LANE] */
    const uint16_t *scales;   /* [num_outputs / OUTPUTS, num_inputs / group_size, 1 or 2, OUTPUTS] float16 */
    const uint16_t *minimums; /* the second of 2; or NULL: the middle code stands for 0 */
    int64_t num_outputs, num_inputs, group_size, bits;
} Matrix;

/* Inputs rounded to 8 bits. With weights of 4 bits, every eight are ordered 0, 2, 4, 6, 1, 3, 5, 7: a byte of weights
   holds two successive ones. AVX2 has no products of 8 bits whose sums fit: with weights of 8 bits, inputs are kept in
   16, every four ordered 0, 2, 1, 3. */
typedef struct {
    int8_t *codes;   /* [num_rows, num_groups, GROUP]; room for 16 bits each */
    float *scales;   /* [num_rows, num_groups] */
    float *sums;     /* of the rounded inputs, [num_rows, num_groups] */
    int32_t *starts; /* of sums of products: less those of the middle code, [num_rows, num_groups] */
    int64_t num_groups;
} Rows;

/* Round `count` groups of inputs, from the `at`-th of all rows on. */
COMPILED_ONCE void round_groups(const element *from, Rows x, int64_t at, int64_t count, const Matrix *w);

/* Compute outputs from `first` on, at most TILE_OUTPUTS, of all rows. */
COMPILED_ONCE void multiply_outputs(
    const Matrix *w, Rows x, const element *bias, /* [num_outputs]; or NULL */
    element *out /* [num_rows, num_outputs] */, int64_t num_rows, int64_t first);
