/* Row operations between the matrix products. */
#pragma once

#include "element.h"

/* Normalise `row` [width]. Given a `residual`, add it first; `total` becomes the sum, and may be the residual. */
INLINE void normalise(
    const element *row, const element *residual, const element *weight, element *normed, element *total, int64_t width,
    float eps, float weight_offset) {
    if (residual) {
#pragma omp simd
        for (int64_t i = 0; i < width; i++) total[i] = round_to_element(load(row[i]) + load(residual[i]));
        row = total;
    }
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < width; i++) squares += load(row[i]) * load(row[i]);
    float factor = 1.0f / sqrtf(squares / (float)width + eps);
#pragma omp simd
    for (int64_t i = 0; i < width; i++)
        normed[i] = round_to_element(load(row[i]) * factor * (load(weight[i]) + weight_offset));
}

/* Multiply SiLU of `gate` [width] by `up`. */
INLINE void activate(const element *gate, const element *up, element *out, int64_t width) {
#pragma omp simd
    for (int64_t i = 0; i < width; i++) {
        float g = load(gate[i]);
        out[i] = round_to_element(g / (1.0f + fast_exp(-g)) * load(up[i]));
    }
}

/* The blocks of one layer's keys or values. */
typedef struct {
    int64_t block_size, num_kv_heads, head_dim;
    int64_t scales_at; /* bytes from a block to its scales [num_kv_heads, block_size]; 0: the cache has elements */
} Blocks;

/* Round a key or value to codes of 8 bits, and return their scale. */
INLINE float round_head(const element *row, int8_t *codes, int64_t head_dim) {
    float scale = largest_of(row, head_dim) / LARGEST, inverse = scale > LEAST ? 1.0f / scale : 0.0f;
#pragma omp simd
    for (int64_t d = 0; d < head_dim; d++) codes[d] = round_within(load(row[d]) * inverse, LARGEST);
    return scale;
}

/* Store a key or value in a slot. */
INLINE void store_head(void *cache, Blocks b, int64_t block_stride, int64_t slot, int64_t kv_head, const element *row) {
    int64_t block = slot / b.block_size * block_stride, offset = slot % b.block_size;
    int64_t at = block + (offset * b.num_kv_heads + kv_head) * b.head_dim;
    if (b.scales_at) {
        float *scales = (float *)((char *)cache + block + b.scales_at);
        scales[kv_head * b.block_size + offset] = round_head(row, (int8_t *)cache + at, b.head_dim);
    } else {
        memcpy((element *)cache + at, row, b.head_dim * sizeof(element));
    }
}

/* Normalise (given a weight) and rotate one head in place. */
INLINE void rotate(
    element *head, const element *weight, const float *cos, const float *sin, int64_t head_dim, int64_t half,
    float eps) {
    float x[MAX_HEAD_DIM];
#pragma omp simd
    for (int64_t i = 0; i < head_dim; i++) x[i] = load(head[i]);
    if (weight) {
        float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < head_dim; i++) squares += x[i] * x[i];
        float factor = 1.0f / sqrtf(squares / (float)head_dim + eps);
#pragma omp simd
        for (int64_t i = 0; i < head_dim; i++) x[i] *= factor * load(weight[i]);
    }
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        head[i] = round_to_element(x[i] * cos[i] - x[half + i] * sin[i]);
        head[half + i] = round_to_element(x[half + i] * cos[i] + x[i] * sin[i]);
    }
    if (weight)
        for (int64_t i = 2 * half; i < head_dim; i++) head[i] = round_to_element(x[i]);
}
