/* Row operations between the matrix products, one pass each. */
#include <stddef.h>

#include "rows.h"

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
        const element *other = residual ? residual + row * residual_stride : NULL;
        element *sum = residual ? total + row * width : NULL;
        normalise(x + row * x_stride, other, weight, normed + row * width, sum, width, eps, weight_offset);
    }
}

API void silu_and_mul(
    const element *gate_up, /* [num_rows, 2 * width] */
    element *out,           /* [num_rows, width] */
    int64_t num_rows, int64_t width, int64_t stride, int32_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows >= MIN_ROWS_TO_SHARE)
    for (int64_t row = 0; row < num_rows; row++)
        activate(gate_up + row * stride, gate_up + row * stride + width, out + row * width, width);
}

API void rope_and_cache(
    element *q,                  /* [num_tokens, num_q_heads, head_dim] */
    element *k,                  /* [num_tokens, num_kv_heads, head_dim] */
    const element *v,            /* [num_tokens, num_kv_heads, head_dim] */
    const float *cos_sin,        /* [max_position, 2 * half]: cosines, then sines */
    const int64_t *positions,    /* [num_tokens] */
    const int64_t *slot_mapping, /* [num_tokens]; below 0: not cached */
    void *k_cache,               /* [num_blocks, block_size, num_kv_heads, head_dim]; of elements or codes */
    void *v_cache,
    const element *q_weight, /* [head_dim]; or NULL */
    const element *k_weight, int64_t num_tokens, int64_t num_q_heads, int64_t num_kv_heads, int64_t head_dim,
    int64_t half, int64_t q_stride, int64_t q_head_stride, int64_t k_stride, int64_t k_head_stride, int64_t v_stride,
    int64_t v_head_stride, int64_t block_size, int64_t scales_at, int64_t k_block_stride, int64_t v_block_stride,
    float eps, int32_t num_threads) {
    Blocks blocks = {block_size, num_kv_heads, head_dim, scales_at};
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_tokens >= MIN_ROWS_TO_SHARE)
    for (int64_t token = 0; token < num_tokens; token++) {
        const float *cos = cos_sin + positions[token] * 2 * half, *sin = cos + half;
        for (int64_t h = 0; h < num_q_heads; h++)
            rotate(q + token * q_stride + h * q_head_stride, q_weight, cos, sin, head_dim, half, eps);
        int64_t slot = slot_mapping[token];
        for (int64_t h = 0; h < num_kv_heads; h++) {
            element *key = k + token * k_stride + h * k_head_stride;
            rotate(key, k_weight, cos, sin, head_dim, half, eps);
            if (slot < 0) continue;
            store_head(k_cache, blocks, k_block_stride, slot, h, key);
            store_head(v_cache, blocks, v_block_stride, slot, h, v + token * v_stride + h * v_head_stride);
        }
    }
}
