/* Attention of many queries per sequence over the paged cache, with the online softmax: for each tile of keys, each
   tile of queries (Dao and others 2022, "FlashAttention"). Products that no query of a tile sees are left out. */
#include "paged.h"
#include "products.h"

/* Rows of a job: queries of one sequence, each with all query heads of one KV head. They share the packed keys. */
enum { MAX_ROWS = 256 };

typedef struct {
    Paged paged;
    int64_t head_dim, width; /* width: head_dim padded */
    int64_t group;           /* query heads */
    int64_t num_rows;
    int64_t first_position; /* of row 0 */
    int64_t sliding_window;
    float scale, soft_cap;
} Job;

typedef struct {
    operand queries[MAX_ROWS * MAX_HEAD_DIM] __attribute__((aligned(64)));
    float sums[MAX_ROWS * MAX_HEAD_DIM] __attribute__((aligned(64)));
    lane keys[KEYS * MAX_HEAD_DIM / PER_LANE] __attribute__((aligned(64)));
    lane values[KEYS * MAX_HEAD_DIM / PER_LANE] __attribute__((aligned(64)));
    float logits[ROWS * KEYS] __attribute__((aligned(64)));
    operand weights[ROWS * KEYS] __attribute__((aligned(64)));
    float top[MAX_ROWS], total[MAX_ROWS];
    Room room;
} Scratch;

INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE int64_t position(const Job *job, int64_t row) { return job->first_position + row / job->group; }

INLINE int64_t first_key(const Job *job, int64_t row) {
    return job->sliding_window > 0 ? max(position(job, row) - job->sliding_window + 1, 0) : 0;
}

/* Pack keys and values of [first, first + count). Others are zero: what the cache holds there may not be a number. */
static void pack(const Job *job, Scratch *s, int64_t first, int64_t count) {
    static const element zeros[MAX_HEAD_DIM];
    const element *keys[KEYS], *values[KEYS];
    find_tile(&job->paged, first, count, job->head_dim, job->paged.scales_at ? &s->room : NULL, keys, values);
    for (int64_t t = count; t < KEYS; t++) keys[t] = values[t] = zeros;
    for (int64_t i = 0; i < job->head_dim / PER_LANE; i++)
        for (int64_t t = 0; t < KEYS; t++) s->keys[i * KEYS + t] = to_lane(keys[t] + i * PER_LANE);
    for (int64_t i = 0; i < KEYS / PER_LANE; i++)
        for (int64_t d = 0; d < job->head_dim; d++) {
            element pair[PER_LANE];
            for (int64_t j = 0; j < PER_LANE; j++) pair[j] = values[i * PER_LANE + j][d];
            s->values[i * job->width + d] = to_lane(pair);
        }
}

#if defined USES_TILES
/* Do what `weigh` does with KEYS logits, times `scale`; write the weights as operands. */
INLINE float weigh_operands(const float *logits, float scale, float *top, float *total, operand *weights) {
    __m512 x[4], sum = _mm512_setzero_ps();
    for (int i = 0; i < 4; i++) x[i] = _mm512_load_ps(logits + 16 * i);
    float highest = scale * _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3])));
    highest = highest > *top ? highest : *top;
    __m512 factor = _mm512_set1_ps(scale * LOG2_E), less = _mm512_set1_ps(-highest * LOG2_E);
    for (int i = 0; i < 4; i++) {
        x[i] = exp2_of(_mm512_fmadd_ps(x[i], factor, less));
        sum = _mm512_add_ps(sum, x[i]);
    }
    for (int i = 0; i < 4; i += 2)
        _mm512_storeu_si512(weights + 16 * i, (__m512i)_mm512_cvtne2ps_pbh(x[i + 1], x[i]));
    float fade = _mm512_cvtss_f32(exp2_of(_mm512_set1_ps((*top - highest) * LOG2_E)));
    *total = *total * fade + _mm512_reduce_add_ps(sum);
    *top = highest;
    return fade;
}
#else
INLINE float weigh_operands(float *logits, float scale, float *top, float *total, operand *weights) {
    for (int32_t t = 0; t < KEYS; t++) logits[t] *= scale;
    float fade = weigh(logits, KEYS, top, total);
    memcpy(weights, logits, KEYS * sizeof *weights);
    return fade;
}
#endif

/* Hide keys that the row must not see, and weigh the others. */
INLINE void weigh_row(const Job *job, Scratch *s, int64_t row, int64_t first) {
    float *logits = s->logits + row % ROWS * KEYS;
    int32_t begin = max(first_key(job, row) - first, 0), end = min(position(job, row) + 1 - first, KEYS);
    float scale = job->scale, cap = job->soft_cap;
    if (cap > 0.0f) {
        for (int32_t t = 0; t < KEYS; t++) logits[t] = cap * fast_tanh(logits[t] * (scale / cap));
        scale = 1.0f;
    }
    if (begin > 0 || end < KEYS)
        for (int32_t t = 0; t < KEYS; t++) logits[t] = t >= begin && t < end ? logits[t] : LOWEST;
    float fade = weigh_operands(logits, scale, &s->top[row], &s->total[row], s->weights + row % ROWS * KEYS);
    if (fade != 1.0f)
        for (int64_t d = 0; d < job->width; d++) s->sums[row * job->width + d] *= fade;
}

static void attend_tile(const Job *job, Scratch *s, int64_t row, int64_t first) {
    int64_t last = min(row + ROWS, job->num_rows) - 1;
    if (first > position(job, last) || first + KEYS <= first_key(job, row)) return;
    multiply(s->queries + row * job->width, s->keys, s->logits, KEYS, job->width, 0);
    for (int64_t r = row; r <= last; r++) weigh_row(job, s, r, first);
    multiply(s->weights, s->values, s->sums + row * job->width, job->width, KEYS, 1);
}

static void attend(const Job *job, Scratch *s, const element *q, int64_t q_stride, int64_t q_head_stride) {
    int64_t num_padded = padded(job->num_rows);
    memset(s->queries, 0, num_padded * job->width * sizeof(operand));
    memset(s->sums, 0, num_padded * job->width * sizeof(float));
    for (int64_t row = 0; row < job->num_rows; row++) {
        const element *query = q + row / job->group * q_stride + row % job->group * q_head_stride;
        for (int64_t d = 0; d < job->head_dim; d++) s->queries[row * job->width + d] = as_operand(query[d]);
        s->top[row] = LOWEST;
        s->total[row] = 0.0f;
    }
    int64_t end = position(job, job->num_rows - 1) + 1;
    for (int64_t first = first_key(job, 0); first < end; first += KEYS) {
        pack(job, s, first, min(end - first, KEYS));
        for (int64_t row = 0; row < job->num_rows; row += ROWS) attend_tile(job, s, row, first);
    }
}

INLINE void write_rows(const Job *job, const Scratch *s, element *out, int64_t num_q_heads) {
    for (int64_t row = 0; row < job->num_rows; row++) {
        element *to = out + (row / job->group * num_q_heads + row % job->group) * job->head_dim;
        float factor = s->total[row] > 0.0f ? 1.0f / s->total[row] : 0.0f;
        for (int64_t d = 0; d < job->head_dim; d++) to[d] = round_to_element(s->sums[row * job->width + d] * factor);
    }
}

API void prompt_attention(
    const element *q,       /* [num_tokens, num_kv_heads * group, head_dim] */
    const void *k_cache,    /* [num_blocks, block_size, num_kv_heads, head_dim]; of elements or codes */
    const void *v_cache,
    const int32_t *block_tables, /* [num_seqs, table_stride] */
    const int32_t *cu_seqlens_q, /* [num_seqs + 1] */
    const int32_t *seq_lens,     /* [num_seqs]; 0: the rows become zero */
    element *out,                /* [num_tokens, num_kv_heads * group, head_dim] */
    int64_t first_seq,           /* earlier ones are left alone */
    int64_t num_seqs, int64_t num_kv_heads, int64_t group, int64_t head_dim, int64_t block_size, int64_t scales_at,
    int64_t q_stride, int64_t q_head_stride, int64_t k_block_stride, int64_t v_block_stride, int64_t table_stride,
    int64_t max_query_len,
    int64_t sliding_window, /* 0: every earlier key is seen */
    float scale,
    float soft_cap, /* 0: none */
    int32_t num_threads) {
    Paged cache = {k_cache, v_cache, NULL, k_block_stride, v_block_stride, num_kv_heads * head_dim, block_size, scales_at};
    int64_t queries_per_job = max(MAX_ROWS / group, 1);
    int64_t num_parts = (max_query_len + queries_per_job - 1) / queries_per_job;
    int64_t num_jobs = (num_seqs - first_seq) * num_parts * num_kv_heads;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        Scratch scratch;
        memset(scratch.keys, 0, sizeof scratch.keys); /* what pads dimensions stays zero, and rows stay numbers */
        memset(scratch.values, 0, sizeof scratch.values);
        memset(scratch.weights, 0, sizeof scratch.weights);
        begin_products();
#pragma omp for schedule(dynamic)
        for (int64_t index = 0; index < num_jobs; index++) {
            /* The last parts, which see most keys, first. */
            int64_t part = num_parts - 1 - index / num_kv_heads / (num_seqs - first_seq);
            int64_t seq = first_seq + index / num_kv_heads % (num_seqs - first_seq), kv_head = index % num_kv_heads;
            int64_t query_len = cu_seqlens_q[seq + 1] - cu_seqlens_q[seq], begin = part * queries_per_job;
            if (begin >= query_len) continue;
            Job job = {
                .paged = paged_of(cache, block_tables + seq * table_stride, kv_head, head_dim),
                .head_dim = head_dim,
                .width = padded(head_dim),
                .group = group,
                .num_rows = min(query_len - begin, queries_per_job) * group,
                .first_position = seq_lens[seq] - query_len + begin,
                .sliding_window = sliding_window,
                .scale = scale,
                .soft_cap = soft_cap,
            };
            int64_t token = cu_seqlens_q[seq] + begin, head = kv_head * group;
            attend(&job, &scratch, q + token * q_stride + head * q_head_stride, q_stride, q_head_stride);
            write_rows(&job, &scratch, out + (token * num_kv_heads * group + head) * head_dim, num_kv_heads * group);
        }
        end_products();
    }
}
