/* Products with adapters of low rank, read once: by inputs, then by outputs. */
#include "lora.h"

enum { SHARES = 8 /* of a thread */, LEAST_OUTPUTS = 256, MOST_OUTPUTS = 1024 /* of a piece */ };
enum { SHRINKS_AHEAD = 1 /* pieces whose matrices are fetched */ };

INLINE floats add_pairs(floats sum, ints a, ints x) {
#if defined ELEMENT_FLOAT32
    return multiply_add(sum, (floats)a, (floats)x);
#elif defined __AVX512BF16__
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)x);
#else
    sum = multiply_add(sum, (floats)(a << 16), (floats)(x << 16));
    return multiply_add(sum, (floats)(a & (int32_t)0xffff0000), (floats)(x & (int32_t)0xffff0000));
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

/* Write the sum over the lanes of each vector; the order of additions is the same for all. */
#if defined __AVX512F__
INLINE void sum_lanes(const floats *v, float *to, const int count) {
    __m512 zero = _mm512_setzero_ps(), v0 = (__m512)v[0], v1 = count > 1 ? (__m512)v[1] : zero;
    __m512 v2 = count > 2 ? (__m512)v[2] : zero, v3 = count > 3 ? (__m512)v[3] : zero;
    __m512d pair01 = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(v0, v1), _mm512_unpackhi_ps(v0, v1)));
    __m512d pair23 = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(v2, v3), _mm512_unpackhi_ps(v2, v3)));
    __m512 four = _mm512_add_ps(
        _mm512_castpd_ps(_mm512_unpacklo_pd(pair01, pair23)), _mm512_castpd_ps(_mm512_unpackhi_pd(pair01, pair23)));
    four = _mm512_add_ps(four, _mm512_shuffle_f32x4(four, four, 0x4e));
    __m128 sums = _mm512_castps512_ps128(_mm512_add_ps(four, _mm512_shuffle_f32x4(four, four, 0xb1)));
    memcpy(to, &sums, count * sizeof *to);
}
#elif defined __AVX__
INLINE void sum_lanes(const floats *v, float *to, const int count) {
    __m256 zero = _mm256_setzero_ps(), v0 = (__m256)v[0], v1 = count > 1 ? (__m256)v[1] : zero;
    __m256 v2 = count > 2 ? (__m256)v[2] : zero, v3 = count > 3 ? (__m256)v[3] : zero;
    __m256 four = _mm256_hadd_ps(_mm256_hadd_ps(v0, v1), _mm256_hadd_ps(v2, v3));
    __m128 sums = _mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1));
    memcpy(to, &sums, count * sizeof *to);
}
#else
/* Not inlined: one order of additions for all. */
static __attribute__((noinline)) float sum_of_lanes(floats v) {
    float half[LANES / 2], total = 0.0f;
    for (int i = 0; i < LANES / 2; i++) half[i] = v[i] + v[i + LANES / 2];
    for (int i = 0; i < LANES / 2; i++) total += half[i];
    return total;
}

INLINE void sum_lanes(const floats *v, float *to, const int count) {
    for (int i = 0; i < count; i++) to[i] = sum_of_lanes(v[i]);
}
#endif

/* Add the products of up to PER_VECTOR inputs from `k` on. */
INLINE void shrink_inputs(
    const element *a, int64_t num_inputs, const element *const x[LORA_FEW], int64_t k, int64_t count,
    floats sum[LORA_FEW][LORA_RANKS], const int num_rows, const int num_ranks) {
    ints of_a[LORA_RANKS];
#pragma GCC unroll 4
    for (int c = 0; c < num_ranks; c++) of_a[c] = load_vector(a + c * num_inputs + k, count);
#pragma GCC unroll 4
    for (int r = 0; r < num_rows; r++) {
        ints of_x = load_vector(x[r] + k, count);
#pragma GCC unroll 4
        for (int c = 0; c < num_ranks; c++) sum[r][c] = add_pairs(sum[r][c], of_a[c], of_x);
    }
}

INLINE void shrink_few(
    const element *a, const element *next, int64_t num_inputs, const element *const rows[LORA_FEW],
    float *const h[LORA_FEW], const int num_rows, const int num_ranks) {
    const element *x[LORA_FEW];
    floats sum[LORA_FEW][LORA_RANKS];
#pragma GCC unroll 4
    for (int r = 0; r < num_rows; r++) {
        x[r] = rows[r];
#pragma GCC unroll 4
        for (int c = 0; c < num_ranks; c++) sum[r][c] = (floats){0};
    }
    int64_t k = 0;
    for (; k + PER_VECTOR <= num_inputs; k += PER_VECTOR) {
        for (int c = 0; c < num_ranks; c++) __builtin_prefetch(next + c * num_inputs + k);
        shrink_inputs(a, num_inputs, x, k, PER_VECTOR, sum, num_rows, num_ranks);
    }
    if (k < num_inputs) shrink_inputs(a, num_inputs, x, k, num_inputs - k, sum, num_rows, num_ranks);
#pragma GCC unroll 4
    for (int r = 0; r < num_rows; r++) sum_lanes(sum[r], h[r], num_ranks);
}

static void shrink_rank(
    const element *a, const element *next, int64_t num_inputs, const element *const x[LORA_FEW],
    float *const h[LORA_FEW], int64_t num_rows) {
    switch (num_rows) {
        case 1: shrink_few(a, next, num_inputs, x, h, 1, 1); break;
        case 2: shrink_few(a, next, num_inputs, x, h, 2, 1); break;
        case 3: shrink_few(a, next, num_inputs, x, h, 3, 1); break;
        case 4: shrink_few(a, next, num_inputs, x, h, 4, 1); break;
    }
}

static void shrink_ranks(
    const element *a, const element *next, int64_t num_inputs, const element *const x[LORA_FEW],
    float *const h[LORA_FEW], int64_t num_rows) {
    switch (num_rows) {
        case 1: shrink_few(a, next, num_inputs, x, h, 1, LORA_RANKS); break;
        case 2: shrink_few(a, next, num_inputs, x, h, 2, LORA_RANKS); break;
        case 3: shrink_few(a, next, num_inputs, x, h, 3, LORA_RANKS); break;
        case 4: shrink_few(a, next, num_inputs, x, h, 4, LORA_RANKS); break;
    }
}

typedef struct {
    int64_t tile, part, rank; /* the first of LORA_RANKS */
} ShrinkPiece;

INLINE ShrinkPiece shrink_piece(const LoraStack *s, int64_t piece) {
    int64_t per_part = pieces_of_part(s);
    return (ShrinkPiece){piece / per_part / s->num_parts, piece / per_part % s->num_parts, piece % per_part * LORA_RANKS};
}

const element *shrink_matrix(const LoraStack *s, const LoraGroups *g, int64_t piece) {
    ShrinkPiece at = shrink_piece(s, piece);
    if (at.tile >= g->num_tiles || g->slots[at.tile] < 0) return NULL;
    const LoraPart *p = parts_of_tile(s, g, at.tile) + at.part;
    return at.rank < p->rank ? p->a + at.rank * s->num_inputs : NULL;
}

void shrink_lora(
    const LoraStack *s, const LoraGroups *g, const element *x, int64_t x_stride, float *h, int64_t piece) {
    ShrinkPiece at = shrink_piece(s, piece);
    const element *a = shrink_matrix(s, g, piece), *next = shrink_matrix(s, g, piece + SHRINKS_AHEAD);
    if (a == NULL) return;
    if (next == NULL) next = a;
    int64_t left = parts_of_tile(s, g, at.tile)[at.part].rank - at.rank, count = rows_of_tile(g, at.tile);
    const int32_t *rows = g->rows + at.tile * LORA_TILE;
    float *to = h + at.tile * LORA_TILE * lora_width(s) + at.part * s->max_rank + at.rank;
    for (int64_t row = 0; row < count; row += LORA_FEW) {
        int64_t few = count - row < LORA_FEW ? count - row : LORA_FEW;
        const element *from[LORA_FEW];
        float *sums[LORA_FEW];
        for (int64_t r = 0; r < few; r++) {
            from[r] = x + rows[row + r] * x_stride;
            sums[r] = to + (row + r) * lora_width(s);
        }
        if (left >= LORA_RANKS) {
            shrink_ranks(a, next, s->num_inputs, from, sums, few);
            continue;
        }
        for (int64_t k = 0; k < left; k++) {
            shrink_rank(a + k * s->num_inputs, next, s->num_inputs, from, sums, few);
            for (int64_t r = 0; r < few; r++) sums[r]++;
        }
    }
}

#if defined ELEMENT_BFLOAT16 && defined __AVX512BF16__
typedef int32_t Factor; /* two successive ranks of a @ x as bfloat16, to which PEFT rounds them, too */
enum { FACTOR_RANKS = 2, BLOCK_VECTORS = 2 /* that `load_block` fills */ };

INLINE void load_factors(const float *h, int64_t rank, Factor *to) {
    for (int64_t k = 0; k < rank; k += LANES) {
        __m512 values = _mm512_maskz_loadu_ps(first_lanes(rank - k), h + k);
        _mm256_storeu_si256((__m256i *)(to + k / 2), (__m256i)_mm512_cvtneps_pbh(values));
    }
}

INLINE __mmask32 first_outputs(int64_t count) { return count < PER_VECTOR ? (1u << count) - 1 : ~0u; }

/* Interleave the outputs of one or two ranks. Of 8 groups of 4 outputs, to[0] has the even ones, to[1] the odd ones. */
INLINE void load_block(const element *b, int64_t num_outputs, int64_t num_ranks, int64_t count, floats to[2]) {
    __m512i rank0 = _mm512_maskz_loadu_epi16(first_outputs(count), b), rank1 = _mm512_setzero_si512();
    if (num_ranks > 1) rank1 = _mm512_maskz_loadu_epi16(first_outputs(count), b + num_outputs);
    to[0] = (floats)_mm512_unpacklo_epi16(rank0, rank1), to[1] = (floats)_mm512_unpackhi_epi16(rank0, rank1);
}

INLINE floats add_factor(floats sum, Factor factor, floats of_b) {
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)of_b, (__m512bh)_mm512_set1_epi32(factor));
}

/* Load up to PER_VECTOR outputs, as `load_block` arranges them. */
INLINE void load_outputs(const element *from, int64_t count, floats to[2]) {
    __m512i zero = _mm512_setzero_si512(), outputs = _mm512_maskz_loadu_epi16(first_outputs(count), from);
    to[0] = (floats)_mm512_unpacklo_epi16(zero, outputs), to[1] = (floats)_mm512_unpackhi_epi16(zero, outputs);
}

/* Store up to PER_VECTOR outputs. vcvtne2ps2bf16 makes zeros of denormals. */
INLINE void store_outputs(element *to, const floats sum[2], int64_t count) {
    __m512i groups = (__m512i)_mm512_cvtne2ps_pbh((__m512)sum[1], (__m512)sum[0]);
    groups = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), groups); /* back in order */
    _mm512_mask_storeu_epi16(to, first_outputs(count), groups);
}
#else
typedef float Factor; /* a @ x of a rank */
enum { FACTOR_RANKS = 1, BLOCK_VECTORS = 1 /* that `load_block` fills */ };

INLINE void load_factors(const float *h, int64_t rank, Factor *to) { memcpy(to, h, rank * sizeof *h); }

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
#if defined __AVX512F__
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)part), 16);
#else
    return (floats)(__builtin_convertvector(part, ints) << 16);
#endif
#endif
}

INLINE void load_outputs(const element *from, int64_t count, floats *to) { *to = load_floats(from, count); }

/* Store up to LANES elements. */
INLINE void store_outputs(element *to, const floats *sum, int64_t count) {
#if defined ELEMENT_BFLOAT16 && defined __AVX512F__
    if (count >= LANES) {
        __m512i bits = (__m512i)*sum;
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        bits = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
        bits = _mm512_mask_set1_epi32(bits, _mm512_cmp_ps_mask((__m512)*sum, (__m512)*sum, _CMP_UNORD_Q), 0x7fc0);
        __m256i rounded = _mm512_cvtepi32_epi16(bits);
        _mm256_storeu_si256((__m256i *)to, rounded);
        return;
    }
#endif
    for (int i = 0; i < LANES && i < count; i++) to[i] = round_to_element((*sum)[i]);
}

INLINE void load_block(const element *b, int64_t num_outputs, int64_t num_ranks, int64_t count, floats *to) {
    (void)num_outputs, (void)num_ranks;
    *to = load_floats(b, count);
}

INLINE floats add_factor(floats sum, Factor factor, floats of_b) {
    return multiply_add(sum, (floats){0} + factor, of_b);
}
#endif

/* Add b @ (a @ x) to up to `left` outputs of few rows. */
INLINE void expand_few(
    const element *b, int64_t num_outputs, int64_t rank, const Factor *factors, int64_t stride,
    element *const out[LORA_FEW], int64_t left, const int num_rows, const int num_vectors) {
    floats sum[LORA_FEW][LORA_WIDE], of_b[LORA_WIDE];
#pragma GCC unroll 4
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < num_vectors; c += BLOCK_VECTORS)
            load_outputs(out[r] + c * LANES, left - c * LANES, &sum[r][c]);
    for (int64_t k = 0; k < rank; k += FACTOR_RANKS, b += FACTOR_RANKS * num_outputs) {
#pragma GCC unroll 4
        for (int c = 0; c < num_vectors; c += BLOCK_VECTORS)
            load_block(b + c * LANES, num_outputs, rank - k, left - c * LANES, of_b + c);
#pragma GCC unroll 4
        for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
            for (int c = 0; c < num_vectors; c++)
                sum[r][c] = add_factor(sum[r][c], factors[r * stride + k / FACTOR_RANKS], of_b[c]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < num_vectors; c += BLOCK_VECTORS)
            store_outputs(out[r] + c * LANES, &sum[r][c], left - c * LANES);
}

/* Add them to outputs [first, end) of few rows. Meanwhile, those of the next rows come to the first cache. */
INLINE void expand_range(
    const LoraPart *p, int64_t num_outputs, const Factor *factors, int64_t stride, element *const rows[LORA_FEW],
    element *const next[LORA_FEW], int64_t first, int64_t end, const int num_rows) {
    const element *b = p->b;
    int64_t rank = p->rank, at = first;
    element *out[LORA_FEW];
    for (; at + LORA_WIDE * LANES <= end; at += LORA_WIDE * LANES) {
#pragma GCC unroll 4
        for (int r = 0; r < num_rows; r++) {
            out[r] = rows[r] + at;
            __builtin_prefetch(next[r] + at, 1), __builtin_prefetch(next[r] + at + PER_VECTOR, 1);
        }
        expand_few(b + at, num_outputs, rank, factors, stride, out, LORA_WIDE * LANES, num_rows, LORA_WIDE);
    }
    for (; at < end; at += BLOCK_VECTORS * LANES) {
        for (int r = 0; r < num_rows; r++) out[r] = rows[r] + at;
        expand_few(b + at, num_outputs, rank, factors, stride, out, end - at, num_rows, BLOCK_VECTORS);
    }
}

static void expand_rows(
    const LoraPart *p, int64_t num_outputs, const Factor *factors, int64_t stride, element *const rows[LORA_FEW],
    element *const next[LORA_FEW], int64_t first, int64_t end, int64_t num_rows) {
    switch (num_rows) {
        case 1: expand_range(p, num_outputs, factors, stride, rows, next, first, end, 1); break;
        case 2: expand_range(p, num_outputs, factors, stride, rows, next, first, end, 2); break;
        case 3: expand_range(p, num_outputs, factors, stride, rows, next, first, end, 3); break;
        case 4: expand_range(p, num_outputs, factors, stride, rows, next, first, end, 4); break;
    }
}

INLINE void expand_part(
    const LoraPart *p, int64_t num_outputs, const float *h, int64_t h_stride, const int32_t *rows, int64_t count,
    element *out, int64_t out_stride, int64_t first, int64_t end) {
    int64_t stride = p->rank + LANES; /* room for the last store, of a whole vector */
    Factor factors[LORA_FEW * stride];
    for (int64_t row = 0; row < count; row += LORA_FEW) {
        int64_t few = count - row < LORA_FEW ? count - row : LORA_FEW;
        element *of_row[LORA_FEW], *of_next[LORA_FEW];
        for (int64_t r = 0; r < few; r++) {
            load_factors(h + (row + r) * h_stride, p->rank, factors + r * stride);
            of_row[r] = out + rows[row + r] * out_stride;
            of_next[r] = row + LORA_FEW + r < count ? out + rows[row + LORA_FEW + r] * out_stride : of_row[r];
        }
        expand_rows(p, num_outputs, factors, stride, of_row, of_next, first, end, few);
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
                parts + part, s->ends[part] - begin, h + part * s->max_rank, lora_width(s), g->rows + tile * LORA_TILE,
                rows_of_tile(g, tile), out + begin, out_stride, from - begin, to - begin);
    }
}

API void add_lora(
    const LoraStack *s, const LoraGroups *groups, const element *x, /* [num_rows, num_inputs] */
    element *out,                                                   /* [num_rows, num_outputs] */
    float *h, int64_t x_stride, int64_t out_stride, int32_t num_threads) {
    LoraGroups filled = filled_tiles(groups), *g = &filled;
    int64_t num_outputs = s->ends[s->num_parts - 1], width = MOST_OUTPUTS;
    /* Wide pieces read rows in order; narrower ones give every thread enough of them. */
    while (width > LEAST_OUTPUTS && g->num_tiles * num_outputs < width * num_threads * SHARES) width /= 2;
    int64_t per_tile = (num_outputs + width - 1) / width;
    int64_t num_shrinks = shrink_pieces(s, g), num_expands = g->num_tiles * per_tile;
    int64_t shrink_share = num_shrinks / (num_threads * SHARES) + 1, expand_share = num_expands / (num_threads * SHARES) + 1;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
#pragma omp for schedule(dynamic, shrink_share)
        for (int64_t piece = 0; piece < num_shrinks; piece++) shrink_lora(s, g, x, x_stride, h, piece);
#pragma omp for schedule(dynamic, expand_share)
        for (int64_t piece = 0; piece < num_expands; piece++) {
            int64_t first = piece % per_tile * width, end = first + width;
            expand_lora(s, g, h, out, out_stride, piece / per_tile, first, end < num_outputs ? end : num_outputs);
        }
    }
}
