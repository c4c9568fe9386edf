/* Products with adapters of low rank, read once: by inputs, then by outputs. */
#include "lora.h"

enum { SHARES = 8 /* of a thread */, PIECE_OUTPUTS = 8 * LORA_WIDE * LANES };

INLINE floats add_pairs(floats sum, ints a, ints x) {
#if defined ELEMENT_FLOAT32
    return sum + (floats)a * (floats)x;
#elif defined __AVX512BF16__
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)x);
#else
    sum += (floats)(a << 16) * (floats)(x << 16);
    return sum + (floats)(a & (int32_t)0xffff0000) * (floats)(x & (int32_t)0xffff0000);
#endif
}

INLINE ints load_vector(const element *from, int64_t count) {
    ints vector = {0};
    if (count >= PER_VECTOR)
        memcpy(&vector, from, sizeof vector);
    else
        memcpy(&vector, from, count * sizeof(element));
    return vector;
}

#if defined __AVX512F__
/* Add both halves of segments of 2 * width lanes: of `a` to the lower lanes, of `b` to the upper. */
INLINE floats add_halves(floats a, floats b, const int width) {
    ints lower, upper;
    for (int lane = 0; lane < LANES; lane++) {
        int is_b = (lane & width) != 0;
        lower[lane] = (lane & ~width) + is_b * LANES;
        upper[lane] = (lane | width) + is_b * LANES;
    }
    return __builtin_shuffle(a, b, lower) + __builtin_shuffle(a, b, upper);
}

/* Write the sum of lanes of each vector, with one order of additions for any number of vectors. */
INLINE void add_lanes(floats vectors[LANES], const int count, float sums[LANES]) {
    int left = count > 8 ? 16 : count > 4 ? 8 : count > 2 ? 4 : count, step = LANES / left;
    for (int i = count; i < left; i++) vectors[i] = (floats){0};
    for (int width = LANES / 2; width; width /= 2) {
        if (left == 1) vectors[0] = add_halves(vectors[0], vectors[0], width);
        for (int i = 0; i < left / 2; i++) vectors[i] = add_halves(vectors[i], vectors[i + left / 2], width);
        left = left > 1 ? left / 2 : 1;
    }
    for (int i = 0; i < count; i++) sums[i] = vectors[0][i * step];
}
#else
/* Not inlined: one order of additions for all. */
static __attribute__((noinline)) float sum_of_lanes(const floats *v) {
    float half[LANES / 2], total = 0.0f;
    for (int i = 0; i < LANES / 2; i++) half[i] = (*v)[i] + (*v)[i + LANES / 2];
    for (int i = 0; i < LANES / 2; i++) total += half[i];
    return total;
}

INLINE void add_lanes(floats *vectors, const int count, float *sums) {
    for (int i = 0; i < count; i++) sums[i] = sum_of_lanes(vectors + i);
}
#endif

/* Add the products of up to PER_VECTOR inputs. */
INLINE void add_inputs(
    floats *sum, const element *a, int64_t num_inputs, const element *const x[LORA_FEW], int64_t k, int64_t count,
    const int num_rows, const int num_ranks) {
    ints of_a[LORA_RANKS];
    for (int c = 0; c < num_ranks; c++) {
        of_a[c] = load_vector(a + c * num_inputs + k, count);
        __builtin_prefetch(a + (c + num_ranks) * num_inputs + k);
    }
    for (int r = 0; r < num_rows; r++) {
        ints of_x = load_vector(x[r] + k, count);
        for (int c = 0; c < num_ranks; c++) sum[r * num_ranks + c] = add_pairs(sum[r * num_ranks + c], of_a[c], of_x);
    }
}

INLINE void shrink_few(
    const element *a, int64_t num_inputs, const element *const x[LORA_FEW], float *const h[LORA_FEW],
    const int num_rows, const int num_ranks) {
    floats sum[LANES];
    float sums[LANES];
    int64_t k = 0;
    for (int i = 0; i < num_rows * num_ranks; i++) sum[i] = (floats){0};
    for (; k + PER_VECTOR <= num_inputs; k += PER_VECTOR)
        add_inputs(sum, a, num_inputs, x, k, PER_VECTOR, num_rows, num_ranks);
    if (k < num_inputs) add_inputs(sum, a, num_inputs, x, k, num_inputs - k, num_rows, num_ranks);
    add_lanes(sum, num_rows * num_ranks, sums);
    for (int r = 0; r < num_rows; r++)
        for (int c = 0; c < num_ranks; c++) h[r][c] = sums[r * num_ranks + c];
}

static void shrink_rank(
    const element *a, int64_t num_inputs, const element *const x[LORA_FEW], float *const h[LORA_FEW],
    int64_t num_rows) {
    switch (num_rows) {
        case 1: shrink_few(a, num_inputs, x, h, 1, 1); break;
        case 2: shrink_few(a, num_inputs, x, h, 2, 1); break;
#if defined __AVX512F__
        case 3: shrink_few(a, num_inputs, x, h, 3, 1); break;
        case 4: shrink_few(a, num_inputs, x, h, 4, 1); break;
#endif
    }
}

static void shrink_ranks(
    const element *a, int64_t num_inputs, const element *const x[LORA_FEW], float *const h[LORA_FEW],
    int64_t num_rows) {
    switch (num_rows) {
        case 1: shrink_few(a, num_inputs, x, h, 1, LORA_RANKS); break;
        case 2: shrink_few(a, num_inputs, x, h, 2, LORA_RANKS); break;
#if defined __AVX512F__
        case 3: shrink_few(a, num_inputs, x, h, 3, LORA_RANKS); break;
        case 4: shrink_few(a, num_inputs, x, h, 4, LORA_RANKS); break;
#endif
    }
}

void shrink_lora(
    const LoraStack *s, const LoraGroups *g, const element *x, int64_t x_stride, float *h, int64_t piece) {
    int64_t per_part = (s->max_rank + LORA_RANKS - 1) / LORA_RANKS, rank = piece % per_part * LORA_RANKS;
    int64_t tile = piece / per_part / s->num_parts, part = piece / per_part % s->num_parts;
    if (g->slots[tile] < 0) return;
    const LoraPart *p = parts_of_tile(s, g, tile) + part;
    int64_t count = rows_of_tile(g, tile), end = rank + LORA_RANKS < p->rank ? rank + LORA_RANKS : p->rank;
    const int32_t *rows = g->rows + tile * LORA_TILE;
    float *to = h + tile * LORA_TILE * lora_width(s) + part * s->max_rank;
    for (int64_t row = 0; row < count && rank < end; row += LORA_FEW) {
        int64_t few = count - row < LORA_FEW ? count - row : LORA_FEW;
        const element *from[LORA_FEW];
        float *sums[LORA_FEW];
        for (int64_t r = 0; r < few; r++) {
            from[r] = x + rows[row + r] * x_stride;
            sums[r] = to + (row + r) * lora_width(s) + rank;
        }
        if (end - rank == LORA_RANKS) {
            shrink_ranks(p->a + rank * s->num_inputs, s->num_inputs, from, sums, few);
            continue;
        }
        for (int64_t k = rank; k < end; k++) {
            shrink_rank(p->a + k * s->num_inputs, s->num_inputs, from, sums, few);
            for (int64_t r = 0; r < few; r++) sums[r]++;
        }
    }
}

/* Return up to LANES elements as floats, then zeros. */
INLINE floats load_floats(const element *from, int64_t count) {
#if defined ELEMENT_FLOAT32
    return (floats)load_vector(from, count);
#else
    bfloats part = {0};
    if (count >= LANES)
        memcpy(&part, from, sizeof part);
    else
        memcpy(&part, from, count * sizeof(element));
    return (floats)(__builtin_convertvector(part, ints) << 16);
#endif
}

/* Add to `left` outputs of few rows. */
INLINE void expand_few(
    const element *b, int64_t num_outputs, int64_t rank, const float *h, int64_t h_stride,
    element *const out[LORA_FEW], int64_t left, const int num_rows, const int num_vectors) {
    floats sum[LORA_FEW][LORA_WIDE];
    for (int r = 0; r < num_rows; r++)
        for (int c = 0; c < num_vectors; c++) sum[r][c] = (floats){0};
    for (int64_t k = 0; k < rank; k++, b += num_outputs) {
        floats of_b[LORA_WIDE];
        for (int c = 0; c < num_vectors; c++) {
            of_b[c] = load_floats(b + c * LANES, left - c * LANES);
            __builtin_prefetch(b + (num_vectors + c) * LANES);
        }
        for (int r = 0; r < num_rows; r++)
            for (int c = 0; c < num_vectors; c++) sum[r][c] += h[r * h_stride + k] * of_b[c];
    }
    for (int r = 0; r < num_rows; r++)
        for (int c = 0; c < num_vectors; c++)
            for (int i = 0; i < LANES && i < left - c * LANES; i++)
                out[r][c * LANES + i] = round_to_element(load(out[r][c * LANES + i]) + sum[r][c][i]);
}

static void expand_vectors(
    const element *b, int64_t num_outputs, int64_t rank, const float *h, int64_t h_stride,
    element *const out[LORA_FEW], int64_t num_rows) {
    int64_t left = LORA_WIDE * LANES;
    switch (num_rows) {
        case 1: expand_few(b, num_outputs, rank, h, h_stride, out, left, 1, LORA_WIDE); break;
        case 2: expand_few(b, num_outputs, rank, h, h_stride, out, left, 2, LORA_WIDE); break;
#if defined __AVX512F__
        case 3: expand_few(b, num_outputs, rank, h, h_stride, out, left, 3, LORA_WIDE); break;
        case 4: expand_few(b, num_outputs, rank, h, h_stride, out, left, 4, LORA_WIDE); break;
#endif
    }
}

static void expand_vector(
    const element *b, int64_t num_outputs, int64_t rank, const float *h, int64_t h_stride,
    element *const out[LORA_FEW], int64_t left, int64_t num_rows) {
    left = left < LANES ? left : LANES;
    switch (num_rows) {
        case 1: expand_few(b, num_outputs, rank, h, h_stride, out, left, 1, 1); break;
        case 2: expand_few(b, num_outputs, rank, h, h_stride, out, left, 2, 1); break;
#if defined __AVX512F__
        case 3: expand_few(b, num_outputs, rank, h, h_stride, out, left, 3, 1); break;
        case 4: expand_few(b, num_outputs, rank, h, h_stride, out, left, 4, 1); break;
#endif
    }
}

INLINE void expand_part(
    LoraPart p, int64_t num_outputs, const float *h, int64_t h_stride, const int32_t *rows, int64_t count,
    element *out, int64_t out_stride, int64_t first, int64_t end) {
    for (int64_t row = 0; row < count; row += LORA_FEW) {
        int64_t few = count - row < LORA_FEW ? count - row : LORA_FEW, step;
        for (int64_t at = first; at < end; at += step) {
            element *to[LORA_FEW];
            for (int64_t r = 0; r < few; r++) to[r] = out + rows[row + r] * out_stride + at;
            int is_wide = end - at >= LORA_WIDE * LANES;
            step = is_wide ? LORA_WIDE * LANES : LANES;
            if (is_wide)
                expand_vectors(p.b + at, num_outputs, p.rank, h + row * h_stride, h_stride, to, few);
            else
                expand_vector(p.b + at, num_outputs, p.rank, h + row * h_stride, h_stride, to, end - at, few);
        }
    }
}

void expand_lora(
    const LoraStack *s, const LoraGroups *g, const float *h, element *out, int64_t out_stride, int64_t tile,
    int64_t first, int64_t end) {
    if (g->slots[tile] < 0) return;
    const LoraPart *parts = parts_of_tile(s, g, tile);
    h += tile * LORA_TILE * lora_width(s);
    for (int64_t part = 0, begin = 0; part < s->num_parts; begin = s->ends[part++]) {
        int64_t from = first > begin ? first : begin, to = end < s->ends[part] ? end : s->ends[part];
        if (parts[part].rank && from < to)
            expand_part(
                parts[part], s->ends[part] - begin, h + part * s->max_rank, lora_width(s), g->rows + tile * LORA_TILE,
                rows_of_tile(g, tile), out + begin, out_stride, from - begin, to - begin);
    }
}

API void add_lora(
    const LoraStack *s, const LoraGroups *g, const element *x, /* [num_rows, num_inputs] */
    element *out,                                              /* [num_rows, num_outputs] */
    float *h, int64_t x_stride, int64_t out_stride, int32_t num_threads) {
    int64_t num_outputs = s->ends[s->num_parts - 1], per_tile = (num_outputs + PIECE_OUTPUTS - 1) / PIECE_OUTPUTS;
    int64_t num_shrinks = shrink_pieces(s, g), num_expands = g->num_tiles * per_tile;
    int64_t shrink_share = num_shrinks / (num_threads * SHARES) + 1, expand_share = num_expands / (num_threads * SHARES) + 1;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
#pragma omp for schedule(dynamic, shrink_share)
        for (int64_t piece = 0; piece < num_shrinks; piece++) shrink_lora(s, g, x, x_stride, h, piece);
#pragma omp for schedule(dynamic, expand_share)
        for (int64_t piece = 0; piece < num_expands; piece++) {
            int64_t first = piece % per_tile * PIECE_OUTPUTS, end = first + PIECE_OUTPUTS;
            expand_lora(s, g, h, out, out_stride, piece / per_tile, first, end < num_outputs ? end : num_outputs);
        }
    }
}
