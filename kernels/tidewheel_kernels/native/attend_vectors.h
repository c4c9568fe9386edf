/* Scores and weighted values of a tile of keys, of elements, in vectors: sums stay in registers. */
#pragma once

#include "context.h"

/* Keys to prefetch, as the processor does not guess the stride of one head's keys, into the second cache: fetching into
   the first held up other loads. */
enum { KEYS_AHEAD = 16 };

INLINE void fetch(const element *row, int64_t head_dim) {
    for (int64_t d = 0; d < head_dim; d += 64 / (int64_t)sizeof(element)) __builtin_prefetch(row + d, 0, 2);
}

/* Queries' heads of one KV head, and a tile of keys. */
typedef struct {
    float query[MAX_HEADS][MAX_HEAD_DIM]; /* scaled */
    float sum[MAX_HEADS][MAX_HEAD_DIM];   /* of weighted values */
    float weights[MAX_HEADS][KEYS];       /* at first logits */
    float fades[MAX_HEADS];               /* factors for older sums */
    const element *keys[KEYS], *values[KEYS];
} Heads;

/* Prefetch a value of the tile, and a key that is needed sooner. */
INLINE void fetch_after(const Heads *of, int64_t t, int64_t count, int64_t head_dim) {
    fetch(of->keys[t + KEYS_AHEAD < count ? t + KEYS_AHEAD : count - 1], head_dim);
    fetch(of->values[t < count ? t : count - 1], head_dim);
}

#if defined __AVX512F__
/* Elements of a vector of floats; vectors and heads whose sums stay in registers. */
enum { FLOATS = 16, WIDE = 4, FEW = 4 };

INLINE __m512 load_floats(const element *from) {
#if defined ELEMENT_BFLOAT16
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16));
#else
    return _mm512_loadu_ps(from);
#endif
}

/* Return the sums of sixteen vectors. */
INLINE __m512 sums_of_floats(const __m512 r[FLOATS]) {
    __m512 x[8], y[4], z[2];
    for (int i = 0; i < 8; i++)
        x[i] = _mm512_add_ps(_mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]), _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        __m512d a = _mm512_castps_pd(x[2 * i]), b = _mm512_castps_pd(x[2 * i + 1]);
        y[i] = _mm512_add_ps(
            _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    for (int i = 0; i < 2; i++)
        z[i] = _mm512_add_ps(
            _mm512_shuffle_f32x4(y[2 * i], y[2 * i + 1], 0x88), _mm512_shuffle_f32x4(y[2 * i], y[2 * i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(z[0], z[1], 0x88), _mm512_shuffle_f32x4(z[0], z[1], 0xdd));
}

/* Do what `score_keys` does, by sixteen keys. Heads share the prefetches: many at once held up other loads. */
INLINE void score_keys_by_vectors(
    Heads *of, const Context *c, const element *q, int64_t count, int64_t num_heads, int64_t head_dim) {
    for (int64_t t = count; t % FLOATS; t++) of->keys[t] = of->keys[count - 1];
    for (int64_t first = 0; first < count; first += FLOATS)
        for (int64_t h = 0; h < num_heads; h++) {
            __m512 sums[FLOATS];
#pragma GCC unroll 16
            for (int64_t t = 0; t < FLOATS; t++) {
                const element *key = of->keys[first + t];
                if (t % num_heads == h) fetch_after(of, first + t, count, head_dim);
                sums[t] = _mm512_setzero_ps();
#if defined ELEMENT_BFLOAT16 && defined __AVX512BF16__
                for (int64_t d = 0; d < head_dim; d += 2 * FLOATS) {
                    __m512i query = _mm512_loadu_si512(q + h * c->q_head_stride + d);
                    sums[t] = _mm512_dpbf16_ps(sums[t], (__m512bh)query, (__m512bh)_mm512_loadu_si512(key + d));
                }
#else
                for (int64_t d = 0; d < head_dim; d += FLOATS)
                    sums[t] = _mm512_fmadd_ps(load_floats(q + h * c->q_head_stride + d), load_floats(key + d), sums[t]);
#endif
            }
            _mm512_storeu_ps(of->weights[h] + first, _mm512_mul_ps(sums_of_floats(sums), _mm512_set1_ps(c->scale)));
        }
}

/* Add dimensions from `d` on of a tile's values to the sums of heads from `h` on. */
INLINE void sum_few_values(
    Heads *of, int64_t count, int64_t h, int64_t d, const int64_t num_heads, const int64_t num_vectors) {
    __m512 sum[FEW][WIDE];
    for (int64_t i = 0; i < num_heads; i++)
        for (int64_t v = 0; v < num_vectors; v++)
            sum[i][v] = _mm512_loadu_ps(of->sum[h + i] + d + v * FLOATS) * _mm512_set1_ps(of->fades[h + i]);
    for (int64_t t = 0; t < count; t++) {
        __m512 values[WIDE];
        for (int64_t v = 0; v < num_vectors; v++) values[v] = load_floats(of->values[t] + d + v * FLOATS);
        for (int64_t i = 0; i < num_heads; i++)
            for (int64_t v = 0; v < num_vectors; v++)
                sum[i][v] = _mm512_fmadd_ps(_mm512_set1_ps(of->weights[h + i][t]), values[v], sum[i][v]);
    }
    for (int64_t i = 0; i < num_heads; i++)
        for (int64_t v = 0; v < num_vectors; v++) _mm512_storeu_ps(of->sum[h + i] + d + v * FLOATS, sum[i][v]);
}

INLINE void sum_values_by_vectors(Heads *of, int64_t count, int64_t num_heads, int64_t head_dim) {
    const int64_t num_vectors = head_dim % (WIDE * FLOATS) ? 2 : WIDE;
    for (int64_t d = 0; d < head_dim; d += num_vectors * FLOATS)
        for (int64_t h = 0; h < num_heads; h += FEW)
            switch (10 * (num_heads - h < FEW ? num_heads - h : FEW) + num_vectors) {
                case 12: sum_few_values(of, count, h, d, 1, 2); break;
                case 22: sum_few_values(of, count, h, d, 2, 2); break;
                case 32: sum_few_values(of, count, h, d, 3, 2); break;
                case 42: sum_few_values(of, count, h, d, 4, 2); break;
                case 14: sum_few_values(of, count, h, d, 1, 4); break;
                case 24: sum_few_values(of, count, h, d, 2, 4); break;
                case 34: sum_few_values(of, count, h, d, 3, 4); break;
                case 44: sum_few_values(of, count, h, d, 4, 4); break;
            }
}

/* Return whether a head is of whole vectors. */
INLINE int has_vectors(int64_t head_dim) { return head_dim % (2 * FLOATS) == 0; }
#else
INLINE int has_vectors(int64_t head_dim) { return 0; }
INLINE void score_keys_by_vectors(
    Heads *of, const Context *c, const element *q, int64_t count, int64_t num_heads, int64_t head_dim) {}
INLINE void sum_values_by_vectors(Heads *of, int64_t count, int64_t num_heads, int64_t head_dim) {}
#endif
