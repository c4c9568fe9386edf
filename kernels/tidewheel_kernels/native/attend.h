/* Attention of one query per sequence over the paged cache. Keys are not copied, and each is read once for all query
   heads of its KV head. */
#pragma once

#include "attend_codes.h"
#include "attend_pairs.h"

INLINE float dot(const float *query, const element *key, int64_t head_dim) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < head_dim; d++) sum += query[d] * load(key[d]);
    return sum;
}

INLINE void attend(const Context *c, const element *q, element *out, int64_t num_heads, int64_t head_dim, Room *room) {
    float query[MAX_HEADS][MAX_HEAD_DIM], sum[MAX_HEADS][MAX_HEAD_DIM], weights[MAX_HEADS][KEYS];
    float top[MAX_HEADS], total[MAX_HEADS];
    const element *keys[KEYS], *values[KEYS];
    for (int64_t h = 0; h < num_heads; h++) {
        top[h] = LOWEST;
        total[h] = 0.0f;
        for (int64_t d = 0; d < head_dim; d++) {
            query[h][d] = load(q[h * c->q_head_stride + d]) * c->scale;
            sum[h][d] = 0.0f;
        }
    }
    for (int64_t first = c->begin; first < c->end; first += KEYS) {
        int64_t count = c->end - first < KEYS ? c->end - first : KEYS;
        find_tile(&c->paged, first, count, head_dim, room, keys, values);
        for (int64_t t = 0; t < count; t++) {
            fetch(keys[t + KEYS_AHEAD < count ? t + KEYS_AHEAD : t], head_dim);
            fetch(values[t], head_dim);
            for (int64_t h = 0; h < num_heads; h++) weights[h][t] = dot(query[h], keys[t], head_dim);
        }
        for (int64_t h = 0; h < num_heads; h++) {
            if (c->soft_cap > 0.0f)
                for (int64_t t = 0; t < count; t++) weights[h][t] = c->soft_cap * fast_tanh(weights[h][t] / c->soft_cap);
            float fade = weigh(weights[h], count, &top[h], &total[h]);
            for (int64_t d = 0; d < head_dim; d++) sum[h][d] *= fade;
        }
        for (int64_t t = 0; t < count; t++)
            for (int64_t h = 0; h < num_heads; h++)
#pragma omp simd
                for (int64_t d = 0; d < head_dim; d++) sum[h][d] += weights[h][t] * load(values[t][d]);
    }
    for (int64_t h = 0; h < num_heads; h++) {
        float factor = c->begin < c->end ? 1.0f / total[h] : 0.0f;
        for (int64_t d = 0; d < head_dim; d++) out[h * head_dim + d] = round_to_element(sum[h][d] * factor);
    }
}

INLINE void attend_elements(const Context *c, const element *q, element *out, int64_t num_heads, int64_t head_dim) {
    attend(c, q, out, num_heads, head_dim, NULL);
}

/* Not inlined: its frame is large. */
static __attribute__((noinline)) void attend_expanded(
    const Context *c, const element *q, element *out, int64_t num_heads, int64_t head_dim) {
    Room room;
    attend(c, q, out, num_heads, head_dim, &room);
}

/* Constant head counts and dimensions of today's models, so that inner loops unroll. */
#define CASE(function, heads, dim)                 \
    if (num_heads == (heads) && head_dim == (dim)) \
        return function(c, q, out, heads, dim)
#define CASES(function)    \
    CASE(function, 1, 64);  \
    CASE(function, 2, 64);  \
    CASE(function, 3, 64);  \
    CASE(function, 4, 64);  \
    CASE(function, 2, 128); \
    CASE(function, 4, 128); \
    function(c, q, out, num_heads, head_dim)

void attend_any(const Context *c, const element *q, element *out, int64_t num_heads, int64_t head_dim) {
    if (!c->paged.scales_at) {
#if defined USES_PAIRS
        if (head_dim % WIDTH == 0 && c->soft_cap == 0.0f) {
            CASES(attend_pairs);
            return;
        }
#endif
        CASES(attend_elements);
    }
#if defined USES_CODES
    else if (head_dim % CODES == 0 && c->soft_cap == 0.0f) {
        CASES(attend_codes);
    }
#endif
    else
        attend_expanded(c, q, out, num_heads, head_dim);
}
