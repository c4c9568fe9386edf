/* The paged cache, and the online softmax, by tiles of keys (Milakov and Gimelshein 2018, "Online normalizer
   calculation for softmax"). */
#pragma once

#include <stddef.h>

#include "element.h"

/* Keys of a tile. */
enum { KEYS = 64 };

/* Keys and values of one KV head. */
typedef struct {
    const element *keys, *values; /* at block 0 and offset 0 */
    const int32_t *blocks;
    int64_t k_block_stride, v_block_stride, position_stride, block_size;
} Paged;

/* Return the cache of one sequence and one KV head, `offset` elements into each position. */
INLINE Paged paged_of(Paged cache, const int32_t *blocks, int64_t offset) {
    cache.keys += offset;
    cache.values += offset;
    cache.blocks = blocks;
    return cache;
}

/* Find the keys and values of positions [first, first + count). */
INLINE void find_tile(
    const Paged *p, int64_t first, int64_t count, const element *keys[KEYS], const element *values[KEYS]) {
    int64_t block = first / p->block_size, offset = first % p->block_size;
    for (int64_t t = 0; t < count; t++) {
        keys[t] = p->keys + p->blocks[block] * p->k_block_stride + offset * p->position_stride;
        values[t] = p->values + p->blocks[block] * p->v_block_stride + offset * p->position_stride;
        if (++offset == p->block_size) {
            offset = 0;
            block++;
        }
    }
}

/* Turn logits into weights relative to the new maximum. Return the factor for older sums. */
INLINE float weigh(float *logits, int64_t count, float *top, float *total) {
    float highest = *top, added = 0.0f;
#pragma omp simd reduction(max : highest)
    for (int64_t t = 0; t < count; t++) highest = logits[t] > highest ? logits[t] : highest;
#pragma omp simd reduction(+ : added)
    for (int64_t t = 0; t < count; t++) {
        logits[t] = fast_exp(logits[t] - highest);
        added += logits[t];
    }
    float fade = fast_exp(*top - highest);
    *total = *total * fade + added;
    *top = highest;
    return fade;
}
