#include "attend.h"

API void decode_attention(
    const element *q,       /* [num_seqs, num_kv_heads * group, head_dim] */
    const void *k_cache,    /* [num_blocks, block_size, num_kv_heads, head_dim]; of elements or codes */
    const void *v_cache,
    const int32_t *block_tables, /* [num_seqs, table_stride] */
    const int32_t *seq_lens,     /* [num_seqs]; 0: the row becomes zero */
    element *out,                /* [num_seqs, num_kv_heads * group, head_dim] */
    int64_t num_seqs, int64_t num_kv_heads, int64_t group, int64_t head_dim, int64_t block_size, int64_t scales_at,
    int64_t q_stride, int64_t q_head_stride, int64_t k_block_stride, int64_t v_block_stride, int64_t table_stride,
    int64_t sliding_window, /* 0: every key is seen */
    float scale,
    float soft_cap, /* 0: none */
    int32_t num_threads) {
    Paged cache = {k_cache, v_cache, NULL, k_block_stride, v_block_stride, num_kv_heads * head_dim, block_size, scales_at};
    int64_t num_parts = (group + MAX_HEADS - 1) / MAX_HEADS;
#pragma omp parallel for schedule(dynamic, 4) num_threads(num_threads) if (num_threads > 1)
    for (int64_t job = 0; job < num_seqs * num_kv_heads * num_parts; job++) {
        int64_t seq = job / (num_kv_heads * num_parts), kv_head = job / num_parts % num_kv_heads;
        int64_t head = kv_head * group + job % num_parts * MAX_HEADS;
        int64_t left = (kv_head + 1) * group - head, end = seq_lens[seq];
        Context context = {
            .paged = paged_of(cache, block_tables + seq * table_stride, kv_head, head_dim),
            .begin = sliding_window > 0 && end > sliding_window ? end - sliding_window : 0,
            .end = end,
            .q_head_stride = q_head_stride,
            .scale = scale,
            .soft_cap = soft_cap,
        };
        attend_any(
            &context, q + seq * q_stride + head * q_head_stride, out + (seq * num_kv_heads * group + head) * head_dim,
            left < MAX_HEADS ? left : MAX_HEADS, head_dim);
    }
}
