/* Row operations between the matrix products. */
#pragma once

#include "element.h"

/* Normalise `row` [width]. Given a `residual`, add it first; `total` becomes the sum, and may be the residual. */
COMPILED_ONCE void normalise(
    const element *row, const element *residual, const element *weight, element *normed, element *total, int64_t width,
    float eps, float weight_offset);

/* Multiply SiLU of `gate` [width] by `up`. */
COMPILED_ONCE void activate(const element *gate, const element *up, element *out, int64_t width);

/* The blocks of one layer's keys or values. */
typedef struct {
    int64_t block_size, num_kv_heads, head_dim;
    int64_t scales_at; /* bytes from a block to its scales [num_kv_heads, block_size]; 0: the cache has elements */
} Blocks;

/* Store a key or value in a slot. */
COMPILED_ONCE void store_head(
    void *cache, Blocks b, int64_t block_stride, int64_t slot, int64_t kv_head, const element *row);

/* Normalise (given a weight) and rotate one head in place. */
COMPILED_ONCE void rotate(
    element *head, const element *weight, const float *cos, const float *sin, int64_t head_dim, int64_t half,
    float eps);
