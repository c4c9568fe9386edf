/* Attention of one query per sequence over codes of 8 bits, by products of integers: of queries in two digits, which
   lose less than rounding to bfloat16, and of weights rounded to 8 bits by tile of keys. */
#pragma once

#include "context.h"
#include "lanes.h"

#if defined __AVX512BW__ && defined __AVX512VNNI__
#define USES_CODES

/* Keys of a tile, which lie in one block; tiles to prefetch; codes of a vector, whose 32-bit lanes hold four. */
enum { TILE = 16, TILES_AHEAD = 2, CODES = 64, FOUR = 4, DIGIT = 128, MOST = 126 * DIGIT };

typedef struct {
    int8_t high[MAX_HEAD_DIM] __attribute__((aligned(64))); /* with `low`, digits of the rounded query */
    int8_t low[MAX_HEAD_DIM] __attribute__((aligned(64)));
    float sum[MAX_HEAD_DIM] __attribute__((aligned(64))); /* in the order of `add_values` */
    __m512 total;                                         /* by position in the tile */
    float scale, top;                                     /* of logits in base 2 */
    int32_t start;                                        /* of products: keys are read as 128 more */
} Head;

INLINE void start_head(Head *h, const element *q, int64_t head_dim, float scale) {
    float most = largest_of(q, head_dim), inverse = most > LEAST ? MOST / most : 0.0f;
    int32_t sum = 0;
    for (int64_t d = 0; d < head_dim; d++) {
        int32_t whole = round_within(load(q[d]) * inverse, MOST), high = (whole + DIGIT / 2) >> 7;
        h->high[d] = high;
        h->low[d] = whole - DIGIT * high;
        h->sum[d] = 0.0f;
        sum += whole;
    }
    h->total = _mm512_setzero_ps();
    h->scale = most / MOST * scale * LOG2_E;
    h->top = LOWEST;
    h->start = -128 * sum;
}

INLINE void fetch_codes(const int8_t *row, int64_t head_dim) {
    for (int64_t d = 0; d < head_dim; d += CODES) __builtin_prefetch(row + d, 0, 2);
}

/* Return the products of a query and a tile of keys. Of the `next` tile, the first head prefetches keys, the last values:
   fetching both at once was slower. */
INLINE __m512 multiply_keys(
    const Head *h, Codes tile, Codes next, int64_t stride, int64_t head_dim, int is_first, int is_last) {
    ints sums[TILE];
#pragma GCC unroll 16
    for (int64_t t = 0; t < TILE; t++) {
        __m512i high = _mm512_setzero_si512(), low = high;
        if (is_first) fetch_codes(next.keys + t * stride, head_dim);
        if (is_last) fetch_codes(next.values + t * stride, head_dim);
        for (int64_t d = 0; d < head_dim; d += CODES) {
            __m512i key = _mm512_xor_si512(_mm512_loadu_si512(tile.keys + t * stride + d), _mm512_set1_epi8(-128));
            high = _mm512_dpbusd_epi32(high, key, _mm512_load_si512(h->high + d));
            low = _mm512_dpbusd_epi32(low, key, _mm512_load_si512(h->low + d));
        }
        sums[t] = (ints)_mm512_add_epi32(_mm512_slli_epi32(high, 7), low);
    }
    return _mm512_cvtepi32_ps(_mm512_add_epi32((__m512i)integer_sums_of(sums), _mm512_set1_epi32(h->start)));
}

/* Weights of a tile times scales of values, rounded: four to a lane. `fade` is the factor for older sums. */
typedef struct {
    int32_t fours[TILE / FOUR];
    float step, fade;
} Weights;

INLINE Weights weigh_tile(Head *h, __m512 logits, __m512 value_scales, __mmask16 seen) {
    Weights w = {.fade = 1.0f};
    float highest = _mm512_mask_reduce_max_ps(seen, logits);
    if (highest > h->top) {
        w.fade = _mm512_cvtss_f32(exp2_of(_mm512_set1_ps(h->top - highest)));
        h->top = highest;
    }
    __m512 weights = _mm512_maskz_mov_ps(seen, exp2_of(_mm512_sub_ps(logits, _mm512_set1_ps(h->top))));
    h->total = _mm512_fmadd_ps(h->total, _mm512_set1_ps(w.fade), weights);
    weights = _mm512_mul_ps(weights, value_scales);
    float most = _mm512_reduce_max_ps(weights);
    most = most > LEAST ? most : LEAST;
    w.step = most / 255;
    __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(weights, _mm512_set1_ps(255 / most)));
    _mm_storeu_si128((__m128i *)w.fours, _mm512_cvtusepi32_epi8(whole));
    return w;
}

/* Add dimensions [d, d + CODES) of a tile's values. Lane i of the sums' vector k is d + 16 * (i / 4) + 4 * k + i % 4. */
INLINE void add_values(
    Head *heads, const Weights *w, const int8_t *values, int64_t stride, int64_t num_heads, int64_t d) {
    __m512i sums[MAX_HEADS][FOUR];
    for (int64_t h = 0; h < num_heads; h++)
        for (int k = 0; k < FOUR; k++) sums[h][k] = _mm512_setzero_si512();
    for (int64_t t = 0; t < TILE / FOUR; t++, values += FOUR * stride) {
        __m512i x[FOUR], y[FOUR];
        for (int i = 0; i < FOUR; i++) x[i] = _mm512_loadu_si512(values + i * stride + d);
        for (int i = 0; i < 2; i++) {
            y[2 * i] = _mm512_unpacklo_epi8(x[2 * i], x[2 * i + 1]);
            y[2 * i + 1] = _mm512_unpackhi_epi8(x[2 * i], x[2 * i + 1]);
        }
        for (int i = 0; i < 2; i++) {
            x[2 * i] = _mm512_unpacklo_epi16(y[i], y[i + 2]);
            x[2 * i + 1] = _mm512_unpackhi_epi16(y[i], y[i + 2]);
        }
        for (int64_t h = 0; h < num_heads; h++)
            for (int k = 0; k < FOUR; k++)
                sums[h][k] = _mm512_dpbusd_epi32(sums[h][k], _mm512_set1_epi32(w[h].fours[t]), x[k]);
    }
    for (int64_t h = 0; h < num_heads; h++)
        for (int k = 0; k < FOUR; k++) {
            float *sum = heads[h].sum + d + 16 * k;
            __m512 older = _mm512_mul_ps(_mm512_load_ps(sum), _mm512_set1_ps(w[h].fade));
            _mm512_store_ps(sum, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[h][k]), _mm512_set1_ps(w[h].step), older));
        }
}

INLINE void attend_codes(const Context *c, const element *q, element *out, int64_t num_heads, int64_t head_dim) {
    Head heads[MAX_HEADS];
    Weights weights[MAX_HEADS];
    const int64_t stride = c->paged.position_stride;
    for (int64_t h = 0; h < num_heads; h++) start_head(heads + h, q + h * c->q_head_stride, head_dim, c->scale);
    for (int64_t first = c->begin / TILE * TILE; first < c->end; first += TILE) {
        int64_t ahead = first + TILES_AHEAD * TILE;
        Codes tile = codes_at(&c->paged, first), next = codes_at(&c->paged, ahead < c->end ? ahead : first);
        __mmask16 seen = first_lanes(c->end - first);
        if (first < c->begin) seen &= 0xffff << (c->begin - first);
        __m512 key_scales = _mm512_maskz_loadu_ps(seen, tile.key_scales);
        __m512 value_scales = _mm512_maskz_loadu_ps(seen, tile.value_scales);
        /* Rounded weights cannot be NaN, but totals can. */
        __mmask16 is_nan = _mm512_cmp_ps_mask(value_scales, value_scales, _CMP_UNORD_Q);
        key_scales = _mm512_mask_mov_ps(key_scales, is_nan, value_scales);
        __builtin_prefetch(next.key_scales, 0, 2);
        __builtin_prefetch(next.value_scales, 0, 2);
        for (int64_t h = 0; h < num_heads; h++) {
            __m512 products = multiply_keys(heads + h, tile, next, stride, head_dim, h == 0, h == num_heads - 1);
            __m512 logits = _mm512_mul_ps(_mm512_mul_ps(products, key_scales), _mm512_set1_ps(heads[h].scale));
            weights[h] = weigh_tile(heads + h, logits, value_scales, seen);
        }
        for (int64_t d = 0; d < head_dim; d += CODES) add_values(heads, weights, tile.values, stride, num_heads, d);
    }
    for (int64_t h = 0; h < num_heads; h++) {
        float factor = c->begin < c->end ? 1.0f / _mm512_reduce_add_ps(heads[h].total) : 0.0f;
        for (int64_t d = 0; d < head_dim; d++) {
            int64_t at = d / CODES * CODES + d / FOUR % FOUR * 16 + d / 16 % FOUR * FOUR + d % FOUR;
            out[h * head_dim + d] = round_to_element(heads[h].sum[at] * factor);
        }
    }
}
#endif
