/* Row operations between the matrix products, one pass each. */
#include "element.h"

enum { MIN_ROWS_TO_SHARE = 4 }; /* a row takes as long as waking a thread */

API void rms_norm(
    const element *x,        /* [num_rows, width] */
    const element *residual, /* [num_rows, width]; or NULL */
    const element *weight,   /* [width] */
    element *normed,         /* [num_rows, width] */
    element *total,          /* [num_rows, width]: x + residual; untouched without residual */
    int64_t num_rows, int64_t width, int64_t x_stride, int64_t residual_stride, float eps, float weight_offset,
    int32_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows >= MIN_ROWS_TO_SHARE)
    for (int64_t row = 0; row < num_rows; row++) {
        const element *from = x + row * x_stride;
        if (residual) {
            const element *other = residual + row * residual_stride;
            element *to = total + row * width;
#pragma omp simd
            for (int64_t i = 0; i < width; i++) to[i] = round_to_element(load(from[i]) + load(other[i]));
            from = to;
        }
        float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < width; i++) squares += load(from[i]) * load(from[i]);
        float factor = 1.0f / sqrtf(squares / (float)width + eps);
#pragma omp simd
        for (int64_t i = 0; i < width; i++)
            normed[row * width + i] = round_to_element(load(from[i]) * factor * (load(weight[i]) + weight_offset));
    }
}

API void silu_and_mul(
    const element *gate_up, /* [num_rows, 2 * width] */
    element *out,           /* [num_rows, width] */
    int64_t num_rows, int64_t width, int64_t stride, int32_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows >= MIN_ROWS_TO_SHARE)
    for (int64_t row = 0; row < num_rows; row++) {
        const element *gate = gate_up + row * stride, *up = gate + width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            float g = load(gate[i]);
            out[row * width + i] = round_to_element(g / (1.0f + fast_exp(-g)) * load(up[i]));
        }
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

API void rope_and_cache(
    element *q,                  /* [num_tokens, num_q_heads, head_dim] */
    element *k,                  /* [num_tokens, num_kv_heads, head_dim] */
    const element *v,            /* [num_tokens, num_kv_heads, head_dim] */
    const float *cos_sin,        /* [max_position, 2 * half]: cosines, then sines */
    const int64_t *positions,    /* [num_tokens] */
    const int64_t *slot_mapping, /* [num_tokens]; below 0: not cached */
    element *k_cache,            /* [num_blocks, block_size, num_kv_heads, head_dim] */
    element *v_cache,
    const element *q_weight, /* [head_dim]; or NULL */
    const element *k_weight, int64_t num_tokens, int64_t num_q_heads, int64_t num_kv_heads, int64_t head_dim,
    int64_t half, int64_t q_stride, int64_t q_head_stride, int64_t k_stride, int64_t k_head_stride, int64_t v_stride,
    int64_t v_head_stride, int64_t block_size, int64_t k_block_stride, int64_t v_block_stride, float eps,
    int32_t num_threads) {
    size_t head_bytes = head_dim * sizeof(element);
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_tokens >= MIN_ROWS_TO_SHARE)
    for (int64_t token = 0; token < num_tokens; token++) {
        const float *cos = cos_sin + positions[token] * 2 * half, *sin = cos + half;
        for (int64_t h = 0; h < num_q_heads; h++)
            rotate(q + token * q_stride + h * q_head_stride, q_weight, cos, sin, head_dim, half, eps);
        int64_t slot = slot_mapping[token];
        int64_t block = slot / block_size, offset = slot % block_size * num_kv_heads * head_dim;
        for (int64_t h = 0; h < num_kv_heads; h++, offset += head_dim) {
            element *key = k + token * k_stride + h * k_head_stride;
            rotate(key, k_weight, cos, sin, head_dim, half, eps);
            if (slot < 0) continue;
            memcpy(k_cache + block * k_block_stride + offset, key, head_bytes);
            memcpy(v_cache + block * v_block_stride + offset, v + token * v_stride + h * v_head_stride, head_bytes);
        }
    }
}
