/* All layers of a decode step of few rows, in one parallel region: between its products, a step has operations that
   take less time than a call. */
#include <stddef.h>

#include "blocked_products.h"
#include "context.h"
#include "grouped_matrix.h"
#include "lora.h"
#include "lora_extras.h"
#include "rows.h"
#include "team.h"

enum { STAGES = 14 /* 4 with adapters alone, 1 with rows of one sequence */, SEGMENT = 512 /* activations of a piece of work; whole groups */ };

typedef struct {
    const Matrix *grouped; /* or NULL, with `blocked` */
    const BlockedMatrix *blocked;
    const element *bias; /* [num_outputs]; or NULL */
} Linear;

enum { QKV, OUTPUT, GATE_UP, DOWN, LINEARS };

typedef struct {
    const element *input_norm, *mlp_norm; /* [hidden] */
    const element *q_norm, *k_norm;       /* [head_dim]; or NULL */
    Linear linears[LINEARS];
    int64_t sliding_window; /* 0: every key is seen */
} Layer;

typedef struct {
    void *keys, *values; /* [num_blocks, block_size, num_kv_heads, head_dim], of elements or codes */
} Cache;

typedef struct {
    const Layer *layers;
    const float *cos_sin; /* [max_position, 2 * half]: cosines, then sines */
    int64_t num_layers, hidden, intermediate, num_q_heads, num_kv_heads, head_dim, half;
    float eps, scale;
} Decoder;

/* Rows of a step, and room for what its stages hand on. */
typedef struct {
    const Decoder *model;
    const Cache *caches;                /* [num_layers] */
    const int64_t *positions, *slots;   /* [num_rows]; a slot below 0: not cached */
    const int32_t *tables;              /* [num_rows, table_stride] */
    const int32_t *seq_lens;            /* [num_rows]; 0: attention is zero */
    element *x, *residual;              /* [num_rows, hidden] */
    element *normed, *heads, *attended; /* [num_rows, inputs or outputs of a product] */
    element *gate_up, *activated;
    int8_t *codes; /* as in `Rows` */
    float *scales, *sums;
    int32_t *starts;
    const LoraGroups *lora_groups;       /* or NULL: no row has an adapter */
    const LoraStack *const *lora_stacks; /* [num_layers, LINEARS], with groups; NULL: the product has no adapters */
    element *lora_products;              /* `h` of `shrink_lora` */
    int64_t num_rows, table_stride, block_size, scales_at, k_block_stride, v_block_stride;
    int32_t num_threads;
} Step;

typedef void Job(const Step *s, int64_t layer, int64_t piece);

INLINE Rows rounded_rows(const Step *s, int64_t num_groups) {
    return (Rows){s->codes, s->scales, s->sums, s->starts, num_groups};
}

/* Round inputs [first, first + count) of a row for a product with grouped weights. */
INLINE void round_inputs(
    const Step *s, const Linear *linear, const element *row, int64_t index, int64_t first, int64_t count) {
    const Matrix *w = linear->grouped;
    if (!w) return;
    int64_t num_groups = w->num_inputs / GROUP;
    round_groups(row + first, rounded_rows(s, num_groups), index * num_groups + first / GROUP, count / GROUP, w);
}

INLINE const LoraStack *stack_of(const Step *s, int64_t layer, int linear) {
    return s->lora_groups ? s->lora_stacks[layer * LINEARS + linear] : NULL;
}

/* Add the adapters of all rows to a tile's outputs. */
static void add_adapters(const Step *s, const LoraStack *stack, int64_t num_outputs, element *out, int64_t tile) {
    int64_t first = tile * TILE_OUTPUTS;
    for (int64_t row_tile = 0; row_tile < s->lora_groups->num_tiles; row_tile++)
        expand_lora(
            stack, s->lora_groups, s->lora_products, out, num_outputs, row_tile, first, first + TILE_OUTPUTS);
}

INLINE LoraExtras extras_of(const Step *s, int64_t layer, int linear, int64_t tile) {
    int64_t next = layer * LINEARS + linear + 1;
    const LoraStack *following = next < s->model->num_layers * LINEARS ? s->lora_stacks[next] : NULL;
    const BlockedMatrix *w = s->model->layers[layer].linears[linear].blocked;
    return lora_extras(
        s->lora_groups, s->lora_products, stack_of(s, layer, linear), following, w, tile, s->num_rows);
}

/* Not inlined: four copies of all tiles took 7 s to compile. */
static __attribute__((noinline)) void multiply_tile_of(
    const Step *s, int64_t layer, int linear, const element *x, element *out, int64_t tile) {
    const Linear *l = &s->model->layers[layer].linears[linear];
    if (l->grouped) {
        Rows rows = rounded_rows(s, l->grouped->num_inputs / GROUP);
        multiply_outputs(l->grouped, rows, l->bias, out, s->num_rows, tile * TILE_OUTPUTS);
        const LoraStack *stack = stack_of(s, layer, linear);
        if (stack) add_adapters(s, stack, l->grouped->num_outputs, out, tile);
    } else {
        LoraExtras lora;
        if (s->lora_groups) lora = extras_of(s, layer, linear, tile);
        blocked_outputs(
            l->blocked, x, l->blocked->num_inputs, l->bias, out, s->num_rows, tile, s->lora_groups ? &lora.extras : NULL);
    }
}

INLINE int64_t tiles_of(const Linear *l) {
    return l->grouped ? (l->grouped->num_outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS : blocked_tiles(l->blocked);
}

static void begin_layer(const Step *s, int64_t layer, int64_t row) {
    const Decoder *m = s->model;
    const Layer *l = m->layers + layer;
    element *x = s->x + row * m->hidden, *residual = s->residual + row * m->hidden, *normed = s->normed + row * m->hidden;
    if (layer == 0) memcpy(residual, x, m->hidden * sizeof(element));
    normalise(x, layer == 0 ? NULL : residual, l->input_norm, normed, residual, m->hidden, m->eps, 0.0f);
    round_inputs(s, &l->linears[QKV], normed, row, 0, m->hidden);
}

static void project(const Step *s, int64_t layer, int64_t tile) {
    multiply_tile_of(s, layer, QKV, s->normed, s->heads, tile);
}

INLINE element *heads_of(const Step *s, int64_t row) {
    const Decoder *m = s->model;
    return s->heads + row * (m->num_q_heads + 2 * m->num_kv_heads) * m->head_dim;
}

/* Rotate one KV head's key and queries, and store key and value. */
static void store_kv_head(const Step *s, int64_t layer, int64_t piece) {
    const Decoder *m = s->model;
    const Layer *l = m->layers + layer;
    Cache cache = s->caches[layer];
    int64_t row = piece / m->num_kv_heads, kv_head = piece % m->num_kv_heads, dim = m->head_dim;
    int64_t group = m->num_q_heads / m->num_kv_heads, slot = s->slots[row];
    const float *cos = m->cos_sin + s->positions[row] * 2 * m->half, *sin = cos + m->half;
    element *heads = heads_of(s, row), *q = heads + kv_head * group * dim;
    element *key = heads + (m->num_q_heads + kv_head) * dim, *value = key + m->num_kv_heads * dim;
    for (int64_t h = 0; h < group; h++) rotate(q + h * dim, l->q_norm, cos, sin, dim, m->half, m->eps);
    rotate(key, l->k_norm, cos, sin, dim, m->half, m->eps);
    if (slot < 0) return;
    Blocks blocks = {s->block_size, m->num_kv_heads, dim, s->scales_at};
    store_head(cache.keys, blocks, s->k_block_stride, slot, kv_head, key);
    store_head(cache.values, blocks, s->v_block_stride, slot, kv_head, value);
}

static void attend_kv_head(const Step *s, int64_t layer, int64_t piece) {
    const Decoder *m = s->model;
    const Layer *l = m->layers + layer;
    Cache cache = s->caches[layer];
    int64_t row = piece / m->num_kv_heads, kv_head = piece % m->num_kv_heads, dim = m->head_dim;
    int64_t group = m->num_q_heads / m->num_kv_heads, end = s->seq_lens[row];
    const element *q = heads_of(s, row) + kv_head * group * dim;
    element *out = s->attended + (row * m->num_q_heads + kv_head * group) * dim;
    Paged paged = {cache.keys, cache.values, NULL, s->k_block_stride, s->v_block_stride, m->num_kv_heads * dim, s->block_size, s->scales_at};
    Context context = {
        .paged = paged_of(paged, s->tables + row * s->table_stride, kv_head, dim),
        .begin = l->sliding_window > 0 && end > l->sliding_window ? end - l->sliding_window : 0,
        .end = end,
        .q_head_stride = dim,
        .scale = m->scale,
    };
    for (int64_t h = 0; h < group; h += MAX_HEADS)
        attend_any(&context, q + h * dim, out + h * dim, group - h < MAX_HEADS ? group - h : MAX_HEADS, dim);
}

static void store_and_attend(const Step *s, int64_t layer, int64_t piece) {
    store_kv_head(s, layer, piece);
    attend_kv_head(s, layer, piece);
}

/* Attend with successive rows one after the other, as they may share a head's keys. */
static void attend_by_heads(const Step *s, int64_t layer, int64_t piece) {
    attend_kv_head(s, layer, piece % s->num_rows * s->model->num_kv_heads + piece / s->num_rows);
}

/* Return whether some row attends to a key that the row before it stores: such rows are successive tokens of one
   sequence. */
static int has_successive_tokens(const Step *s) {
    for (int64_t row = 1; row < s->num_rows; row++) {
        int64_t before = s->seq_lens[row] - 2, slot = s->slots[row - 1];
        if (before < 0 || slot < 0) continue;
        int64_t block = s->tables[row * s->table_stride + before / s->block_size];
        if (block * s->block_size + before % s->block_size == slot) return 1;
    }
    return 0;
}

static void round_attended(const Step *s, int64_t layer, int64_t row) {
    int64_t width = s->model->num_q_heads * s->model->head_dim;
    round_inputs(s, &s->model->layers[layer].linears[OUTPUT], s->attended + row * width, row, 0, width);
}

static void project_output(const Step *s, int64_t layer, int64_t tile) {
    multiply_tile_of(s, layer, OUTPUT, s->attended, s->x, tile);
}

static void begin_mlp(const Step *s, int64_t layer, int64_t row) {
    const Decoder *m = s->model;
    const Layer *l = m->layers + layer;
    element *x = s->x + row * m->hidden, *residual = s->residual + row * m->hidden, *normed = s->normed + row * m->hidden;
    normalise(x, residual, l->mlp_norm, normed, residual, m->hidden, m->eps, 0.0f);
    round_inputs(s, &l->linears[GATE_UP], normed, row, 0, m->hidden);
}

static void expand(const Step *s, int64_t layer, int64_t tile) {
    multiply_tile_of(s, layer, GATE_UP, s->normed, s->gate_up, tile);
}

static void gate(const Step *s, int64_t layer, int64_t piece) {
    int64_t width = s->model->intermediate, num_segments = (width + SEGMENT - 1) / SEGMENT;
    int64_t row = piece / num_segments, first = piece % num_segments * SEGMENT;
    int64_t count = width - first < SEGMENT ? width - first : SEGMENT;
    const element *from = s->gate_up + row * 2 * width + first;
    element *to = s->activated + row * width;
    activate(from, from + width, to + first, count);
    round_inputs(s, &s->model->layers[layer].linears[DOWN], to, row, first, count);
}

static void contract(const Step *s, int64_t layer, int64_t tile) {
    multiply_tile_of(s, layer, DOWN, s->activated, s->x, tile);
}

#define SHRINK(name, linear, x) \
    static void name(const Step *s, int64_t layer, int64_t piece) { \
        const LoraStack *stack = stack_of(s, layer, linear); \
        shrink_lora(stack, s->lora_groups, x, stack->num_inputs, s->lora_products, piece); \
    }
SHRINK(shrink_qkv, QKV, s->normed)
SHRINK(shrink_output, OUTPUT, s->attended)
SHRINK(shrink_gate_up, GATE_UP, s->normed)
SHRINK(shrink_down, DOWN, s->activated)

INLINE void run(const Step *s, Stage *stage, Job job, int64_t layer, int64_t total) {
    int64_t share = total / (s->num_threads * SHARES_PER_THREAD) + 1, first, end, count = 0;
    while ((end = take_share(stage, total, share, s->num_threads, &first))) {
        for (int64_t piece = first; piece < end; piece++) job(s, layer, piece);
        count += end - first;
    }
    finish_stage(stage, count, total);
}

/* Compute a @ x of a layer's adapters, then the products of its matrix with theirs added: a stage each. */
INLINE void run_product(const Step *s, Stage *stages, Job shrink, Job multiply, int64_t layer, int linear) {
    const LoraStack *stack = stack_of(s, layer, linear);
    if (stack) run(s, stages, shrink, layer, shrink_pieces(stack, s->lora_groups));
    run(s, stages + 1, multiply, layer, tiles_of(&s->model->layers[layer].linears[linear]));
}

static void run_layers(const Step *s, Stage *stages, int stores_first) {
    const Decoder *m = s->model;
    int64_t num_segments = (m->intermediate + SEGMENT - 1) / SEGMENT;
    for (int64_t layer = 0; layer < m->num_layers; layer++, stages += STAGES) {
        run(s, stages, begin_layer, layer, s->num_rows);
        run_product(s, stages + 1, shrink_qkv, project, layer, QKV);
        if (stores_first) {
            run(s, stages + 13, store_kv_head, layer, s->num_rows * m->num_kv_heads);
            run(s, stages + 3, attend_by_heads, layer, s->num_rows * m->num_kv_heads);
        } else {
            run(s, stages + 3, store_and_attend, layer, s->num_rows * m->num_kv_heads);
        }
        if (m->layers[layer].linears[OUTPUT].grouped) run(s, stages + 4, round_attended, layer, s->num_rows);
        run_product(s, stages + 5, shrink_output, project_output, layer, OUTPUT);
        run(s, stages + 7, begin_mlp, layer, s->num_rows);
        run_product(s, stages + 8, shrink_gate_up, expand, layer, GATE_UP);
        run(s, stages + 10, gate, layer, s->num_rows * num_segments);
        run_product(s, stages + 11, shrink_down, contract, layer, DOWN);
    }
}

/* Replace `x`, embeddings, by the last layer's output, and fill `residual`; the next norm adds them. Rows of one
   sequence are adjacent and in order: each sees the keys of those before it. */
API void decode_layers(const Step *given) {
    Step filled = *given, *step = &filled;
    LoraGroups groups;
    if (given->lora_groups) {
        groups = filled_tiles(given->lora_groups);
        filled.lora_groups = &groups;
    }
    int stores_first = has_successive_tokens(step);
    Stage stages[step->model->num_layers * STAGES];
    memset(stages, 0, sizeof stages);
#pragma omp parallel num_threads(step->num_threads) if (step->num_threads > 1)
    run_layers(step, stages, stores_first);
}
