/* The paged cache, and the online softmax, by tiles of keys (Milakov and Gimelshein 2018, "Online normalizer
   calculation for softmax"). */
#pragma once

#include <stddef.h>

#include "element.h"

#if defined __AVX512F__
#include <immintrin.h>
#endif

#define LOG2_E 1.44269504f

/* Keys of a tile. */
enum { KEYS = 64 };

/* Keys and values of one KV head: elements, or codes of 8 bits with a scale by position. */
typedef struct {
    const void *keys, *values; /* at block 0 and offset 0 */
    const int32_t *blocks;
    int64_t k_block_stride, v_block_stride, position_stride, block_size;
    int64_t scales_at; /* bytes from codes at offset 0 to their scales [block_size] float32; 0: elements */
} Paged;

/* Elements of a tile of codes. */
typedef struct {
    element keys[KEYS][MAX_HEAD_DIM], values[KEYS][MAX_HEAD_DIM];
} Room;

/* Return the cache of one sequence and one KV head. Scales [num_kv_heads, block_size] lie `cache.scales_at` bytes into
   each block. */
INLINE Paged paged_of(Paged cache, const int32_t *blocks, int64_t kv_head, int64_t head_dim) {
    int64_t offset = kv_head * head_dim * (cache.scales_at ? 1 : (int64_t)sizeof(element));
    cache.keys = (const char *)cache.keys + offset;
    cache.values = (const char *)cache.values + offset;
    cache.blocks = blocks;
    if (cache.scales_at) cache.scales_at += kv_head * cache.block_size * (int64_t)sizeof(float) - offset;
    return cache;
}

/* Codes and scales of successive positions in a block. */
typedef struct {
    const int8_t *keys, *values;
    const float *key_scales, *value_scales;
} Codes;

INLINE Codes codes_at(const Paged *p, int64_t position) {
    int64_t block = p->blocks[position / p->block_size], offset = position % p->block_size;
    const int8_t *keys = (const int8_t *)p->keys + block * p->k_block_stride;
    const int8_t *values = (const int8_t *)p->values + block * p->v_block_stride;
    const float *key_scales = (const float *)(keys + p->scales_at), *value_scales = (const float *)(values + p->scales_at);
    int64_t at = offset * p->position_stride;
    return (Codes){keys + at, values + at, key_scales + offset, value_scales + offset};
}

/* Not inlined: the loops of tiles of elements stay small. */
static __attribute__((noinline)) void expand_tile(
    const Paged *p, int64_t first, int64_t count, int64_t head_dim, Room *room, const element *keys[KEYS],
    const element *values[KEYS]) {
    for (int64_t t = 0; t < count; t++) {
        Codes from = codes_at(p, first + t);
        float key_scale = *from.key_scales, value_scale = *from.value_scales;
#pragma omp simd
        for (int64_t d = 0; d < head_dim; d++) {
            room->keys[t][d] = round_to_element(key_scale * (float)from.keys[d]);
            room->values[t][d] = round_to_element(value_scale * (float)from.values[d]);
        }
        keys[t] = room->keys[t];
        values[t] = room->values[t];
    }
}

/* Find the keys and values of positions [first, first + count); those of codes are written to `room`, else NULL. */
INLINE void find_tile(
    const Paged *p, int64_t first, int64_t count, int64_t head_dim, Room *room, const element *keys[KEYS],
    const element *values[KEYS]) {
    if (room) {
        expand_tile(p, first, count, head_dim, room, keys, values);
        return;
    }
    const int64_t stride = p->position_stride;
    for (int64_t t = 0; t < count;) {
        int64_t block = p->blocks[(first + t) / p->block_size], offset = (first + t) % p->block_size;
        const element *key = (const element *)p->keys + block * p->k_block_stride + offset * stride;
        const element *value = (const element *)p->values + block * p->v_block_stride + offset * stride;
        for (; t < count && offset < p->block_size; t++, offset++, key += stride, value += stride) {
            keys[t] = key;
            values[t] = value;
        }
    }
}

/* Keys to prefetch, as the processor does not guess the stride of one head's keys, into the second cache: fetching into
   the first held up other loads. */
enum { KEYS_AHEAD = 16 };

INLINE void fetch(const element *row, int64_t head_dim) {
    for (int64_t d = 0; d < head_dim; d += 64 / (int64_t)sizeof(element)) __builtin_prefetch(row + d, 0, 2);
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

#if defined __AVX512F__
/* 2^x for x <= 0 to about 3e-6, far below the rounding of the weights: the Taylor series of 2^f for |f| <= 1/2, and the
   exponent. */
INLINE __m512 exp2_of(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-126.0f), _mm512_min_ps(_mm512_setzero_ps(), x));
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_set1_ps(1.3333558e-3f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6181291e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504109e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}
#endif
