/* Attention of one query per sequence over bfloat16 keys, by products of pairs, which are exact: sums are float32. */
#pragma once

#include "context.h"
#include "lanes.h"

#if defined ELEMENT_BFLOAT16 && defined __AVX512BF16__
#define USES_PAIRS

/* Elements of a vector of pairs; of values whose sums stay in registers. */
enum { PAIRS = 2 * LANES, WIDTH = 4 * LANES };

typedef struct {
    float sum[MAX_HEAD_DIM], weights[KEYS];
    __m512 total; /* by position modulo LANES */
    float top;    /* of logits in base 2 */
    float fade;   /* factor for older sums */
} PairsHead;

/* Write the logits of LANES keys. */
INLINE void multiply_pairs(
    const element *query, const element *const keys[LANES], float *logits, int64_t head_dim, float scale) {
    floats sums[LANES];
#pragma GCC unroll 16
    for (int t = 0; t < LANES; t++) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t d = 0; d < head_dim; d += PAIRS)
            sum = _mm512_dpbf16_ps(
                sum, (__m512bh)_mm512_loadu_si512(query + d), (__m512bh)_mm512_loadu_si512(keys[t] + d));
        sums[t] = (floats)sum;
    }
    *(floats *)logits = sums_of(sums) * scale;
}

/* Turn a tile's logits into weights relative to the new maximum. */
INLINE void weigh_pairs(PairsHead *h, int64_t count) {
    __m512 logits[KEYS / LANES], most = _mm512_set1_ps(LOWEST), added = _mm512_setzero_ps();
    const int64_t num_vectors = (count + LANES - 1) / LANES;
    for (int64_t i = 0; i < num_vectors; i++) {
        logits[i] = _mm512_mask_loadu_ps(
            _mm512_set1_ps(-INFINITY), first_lanes(count - i * LANES), h->weights + i * LANES);
        most = _mm512_max_ps(most, logits[i]);
    }
    float highest = _mm512_reduce_max_ps(most);
    h->fade = 1.0f;
    if (highest > h->top) {
        h->fade = _mm512_cvtss_f32(exp2_of(_mm512_set1_ps(h->top - highest)));
        h->top = highest;
    }
    for (int64_t i = 0; i < num_vectors; i++) {
        __m512 weights = exp2_of(_mm512_sub_ps(logits[i], _mm512_set1_ps(h->top)));
        weights = _mm512_maskz_mov_ps(first_lanes(count - i * LANES), weights); /* if all are -inf, each weighs 2^-126 */
        added = _mm512_add_ps(added, weights);
        _mm512_storeu_ps(h->weights + i * LANES, weights);
    }
    h->total = _mm512_fmadd_ps(h->total, _mm512_set1_ps(h->fade), added);
}

/* Add dimensions [d, d + WIDTH) of a tile's values. */
INLINE void add_wide(PairsHead *heads, const element *const values[KEYS], int64_t count, int64_t num_heads, int64_t d) {
    __m512 sums[MAX_HEADS][WIDTH / LANES];
    for (int64_t h = 0; h < num_heads; h++)
        for (int k = 0; k < WIDTH / LANES; k++)
            sums[h][k] = _mm512_mul_ps(_mm512_loadu_ps(heads[h].sum + d + k * LANES), _mm512_set1_ps(heads[h].fade));
    for (int64_t t = 0; t < count; t++)
        for (int k = 0; k < WIDTH / LANES; k++) {
            __m512i halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(values[t] + d + k * LANES)));
            __m512 value = _mm512_castsi512_ps(_mm512_slli_epi32(halves, 16));
            for (int64_t h = 0; h < num_heads; h++)
                sums[h][k] = _mm512_fmadd_ps(value, _mm512_set1_ps(heads[h].weights[t]), sums[h][k]);
        }
    for (int64_t h = 0; h < num_heads; h++)
        for (int k = 0; k < WIDTH / LANES; k++) _mm512_storeu_ps(heads[h].sum + d + k * LANES, sums[h][k]);
}

INLINE void attend_pairs(const Context *c, const element *q, element *out, int64_t num_heads, int64_t head_dim) {
    PairsHead heads[MAX_HEADS];
    const element *keys[KEYS], *values[KEYS];
    for (int64_t h = 0; h < num_heads; h++) {
        heads[h].top = LOWEST;
        heads[h].total = _mm512_setzero_ps();
        memset(heads[h].sum, 0, head_dim * sizeof(float));
    }
    for (int64_t first = c->begin; first < c->end; first += KEYS) {
        const int64_t count = c->end - first < KEYS ? c->end - first : KEYS;
        find_tile(&c->paged, first, count, head_dim, NULL, keys, values);
        for (int64_t t = count; t % LANES; t++) keys[t] = keys[count - 1]; /* whole vectors are read */
        for (int64_t from = 0; from < count; from += LANES) {
            for (int64_t t = from; t < from + LANES && t < count; t++) {
                fetch(keys[t + KEYS_AHEAD < count ? t + KEYS_AHEAD : t], head_dim);
                fetch(values[t], head_dim);
            }
            for (int64_t h = 0; h < num_heads; h++)
                multiply_pairs(
                    q + h * c->q_head_stride, keys + from, heads[h].weights + from, head_dim, c->scale * LOG2_E);
        }
        for (int64_t h = 0; h < num_heads; h++) weigh_pairs(heads + h, count);
        for (int64_t d = 0; d < head_dim; d += WIDTH) add_wide(heads, values, count, num_heads, d);
    }
    for (int64_t h = 0; h < num_heads; h++) {
        float factor = c->begin < c->end ? 1.0f / _mm512_reduce_add_ps(heads[h].total) : 0.0f;
        for (int64_t d = 0; d < head_dim; d++) out[h * head_dim + d] = round_to_element(heads[h].sum[d] * factor);
    }
}
#endif
