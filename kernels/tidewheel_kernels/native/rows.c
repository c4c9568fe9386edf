/* Row operations between the matrix products, one pass each. */
#include <stddef.h>

#include "rows.h"

enum { MIN_ROWS_TO_SHARE = 4 }; /* a row takes as long as waking a thread */

void normalise(
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

void activate(const element *gate, const element *up, element *out, int64_t width) {
#pragma omp simd
    for (int64_t i = 0; i < width; i++) {
        float g = load(gate[i]);
        out[i] = round_to_element(g / (1.0f + fast_exp(-g)) * load(up[i]));
    }
}

/* Round a key or value to codes of 8 bits, and return their scale. */
static float round_head(const element *row, int8_t *codes, int64_t head_dim) {
    float scale = largest_of(row, head_dim) / LARGEST, inverse = scale > LEAST ? 1.0f / scale : 0.0f;
#pragma omp simd
    for (int64_t d = 0; d < head_dim; d++) codes[d] = round_within(load(row[d]) * inverse, LARGEST);
    return scale;
}

void store_head(void *cache, Blocks b, int64_t block_stride, int64_t slot, int64_t kv_head, const element *row) {
    int64_t block = slot / b.block_size * block_stride, offset = slot % b.block_size;
    int64_t at = block + (offset * b.num_kv_heads + kv_head) * b.head_dim;
    if (b.scales_at) {
        float *scales = (float *)((char *)cache + block + b.scales_at);
        scales[kv_head * b.block_size + offset] = round_head(row, (int8_t *)cache + at, b.head_dim);
    } else {
        memcpy((element *)cache + at, row, b.head_dim * sizeof(element));
    }
}

void rotate(
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
