/* Products with adapters of low rank: a @ x, then b @ (a @ x). Both matrices are stored transposed, and both products add
   up stored rows, each times one input: sums of columns lie side by side in vectors. */
#include "lora.h"

enum { SHARES = 8 /* of a thread */, LEAST_OUTPUTS = 256, MOST_OUTPUTS = 1024 /* of a piece */ };

/* Sums of MOST_FEW rows, and of SHRINK_ROWS for a @ x, stay in registers. a @ x has CHAINS partial sums for each rank:
   with one, each addition would wait for the last. */
enum { RANK_VECTORS = LORA_RANKS / LANES, MOST_VECTORS = 4, MOST_FEW = 6 };
#if defined __AVX512F__
enum { CHAINS = 4, SHRINK_ROWS = 6 };
#define UP_TO_SHRINK_ROWS UP_TO_6
INLINE int output_vectors(int num_rows) {
    (void)num_rows;
    return 4;
}
#else
enum { CHAINS = 2, SHRINK_ROWS = 3 };
#define UP_TO_SHRINK_ROWS UP_TO_3
INLINE int output_vectors(int num_rows) { return num_rows > 3 ? 2 : 4; }
#endif

#if defined __AVX__ && !defined __AVX512F__
static const int32_t FIRST_LANES[2 * LANES] = {-1, -1, -1, -1, -1, -1, -1, -1};
#endif

typedef uint16_t bfloats __attribute__((vector_size(2 * LANES), aligned(2)));

/* Return up to LANES floats, then zeros. */
INLINE floats load_floats(const float *from, int64_t count) {
#if defined __AVX512F__
    return (floats)_mm512_maskz_loadu_ps(first_lanes(count), from);
#else
    if (count >= LANES) return *(const floats *)from;
#if defined __AVX__
    return (floats)_mm256_maskload_ps(from, _mm256_loadu_si256((const __m256i *)(FIRST_LANES + LANES - count)));
#else
    floats part = {0};
    memcpy(&part, from, count * sizeof *from);
    return part;
#endif
#endif
}

/* Store up to LANES floats. */
INLINE void store_floats(float *to, floats values, int64_t count) {
#if defined __AVX512F__
    _mm512_mask_storeu_ps(to, first_lanes(count), (__m512)values);
#else
    if (count >= LANES)
        *(floats *)to = values;
    else
        memcpy(to, &values, count * sizeof *to);
#endif
}

/* Return up to LANES elements as floats, then zeros. */
INLINE floats load_elements(const element *from, int64_t count) {
#if defined ELEMENT_FLOAT32
    return load_floats(from, count);
#elif defined __AVX512BF16__
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(count), from)), 16);
#else
    bfloats part = {0};
    if (count >= LANES)
        memcpy(&part, from, sizeof part);
    else
        memcpy(&part, from, count * sizeof *from);
#if defined __AVX512F__
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)part), 16);
#else
    return (floats)(__builtin_convertvector(part, ints) << 16);
#endif
#endif
}

#if defined ELEMENT_BFLOAT16
/* As `round_to_element`. */
INLINE bfloats round_all(floats values) {
    typedef uint32_t bits_of __attribute__((vector_size(VECTOR_BYTES), aligned(4)));
    bits_of bits = (bits_of)values, is_number = (bits_of)(values == values);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return __builtin_convertvector((bits & is_number) | (0x7fc0 & ~is_number), bfloats);
}
#endif

/* Store up to LANES elements. */
INLINE void store_elements(element *to, floats values, int64_t count) {
#if defined ELEMENT_FLOAT32
    store_floats(to, values, count);
#elif defined __AVX512BF16__ /* makes zeros of denormals */
    _mm256_mask_storeu_epi16(to, first_lanes(count), (__m256i)_mm512_cvtneps_pbh((__m512)values));
#else
    bfloats rounded = round_all(values);
    if (count >= LANES)
        memcpy(to, &rounded, sizeof rounded);
    else
        memcpy(to, &rounded, count * sizeof *to);
#endif
}

#if defined ELEMENT_BFLOAT16 && defined __AVX512BF16__
enum { TOGETHER = 2 /* successive inputs, or stored rows, that a lane holds */ };

/* Return up to LANES columns of a row, and with `num_together` 2 of the next. */
INLINE floats load_columns(const element *row, int64_t stride, int64_t count, const int num_together) {
    const __m512i pairs = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m256i second = num_together > 1 ? _mm256_maskz_loadu_epi16(first_lanes(count), row + stride) : _mm256_setzero_si256();
    __m512i first = _mm512_castsi256_si512(_mm256_maskz_loadu_epi16(first_lanes(count), row));
    return (floats)_mm512_permutexvar_epi16(pairs, _mm512_inserti64x4(first, second, 1));
}

INLINE floats add_product(floats sum, floats columns, const element *x, const int num_together) {
    int32_t inputs = *x;
    if (num_together > 1) memcpy(&inputs, x, sizeof inputs);
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)columns, (__m512bh)_mm512_set1_epi32(inputs));
}
#else
enum { TOGETHER = 1 };

INLINE floats load_columns(const element *row, int64_t stride, int64_t count, const int num_together) {
    (void)stride, (void)num_together;
    return load_elements(row, count);
}

INLINE floats add_product(floats sum, floats columns, const element *x, const int num_together) {
    (void)num_together;
    return multiply_add(sum, (floats){0} + load(*x), columns);
}
#endif

/* Keep in a register: gcc would load it for each product again. */
#if defined __AVX__
#define KEEP(vector) __asm__("" : "+v"(vector))
#else
#define KEEP(vector)
#endif

/* Sums of num_rows rows by num_vectors vectors of columns. */
typedef struct {
    int64_t stride, width; /* elements of a stored row, and columns left in it */
    int num_rows, num_vectors, is_whole; /* no vector reaches past `width` */
} Shape;

INLINE int64_t columns_of(const Shape s, int vector) { return s.is_whole ? LANES : s.width - vector * LANES; }

/* Add row k of `m`, and with `num_together` 2 the next, each times its input in every row of `x`. */
INLINE void add_inputs(
    floats sum[][MOST_VECTORS], const element *m, const element *const x[], int64_t k, const Shape s,
    const int num_together) {
    floats columns[MOST_VECTORS];
    UNROLLED for (int v = 0; v < s.num_vectors; v++)
        columns[v] = load_columns(m + k * s.stride + v * LANES, s.stride, columns_of(s, v), num_together);
    UNROLLED for (int v = 0; v < s.num_vectors; v++) KEEP(columns[v]);
    UNROLLED for (int r = 0; r < s.num_rows; r++)
        UNROLLED for (int v = 0; v < s.num_vectors; v++)
            sum[r][v] = add_product(sum[r][v], columns[v], x[r] + k, num_together);
}

INLINE void shrink_few(
    const element *a, int64_t num_inputs, const element *const x[], element *const h[], const Shape s) {
    floats sum[CHAINS][MOST_FEW][MOST_VECTORS];
    UNROLLED for (int c = 0; c < CHAINS; c++)
        UNROLLED for (int r = 0; r < s.num_rows; r++)
            UNROLLED for (int v = 0; v < s.num_vectors; v++) sum[c][r][v] = (floats){0};
    int64_t k = 0;
    for (; k + CHAINS * TOGETHER <= num_inputs; k += CHAINS * TOGETHER)
        UNROLLED for (int c = 0; c < CHAINS; c++) add_inputs(sum[c], a, x, k + c * TOGETHER, s, TOGETHER);
    for (; k + TOGETHER <= num_inputs; k += TOGETHER) add_inputs(sum[0], a, x, k, s, TOGETHER);
    if (k < num_inputs) add_inputs(sum[0], a, x, k, s, 1);
    const floats one = (floats){0} + 1.0f; /* a compiler would change the order of plain additions */
    UNROLLED for (int r = 0; r < s.num_rows; r++)
        UNROLLED for (int v = 0; v < s.num_vectors; v++) {
            UNROLLED for (int c = 1; c < CHAINS; c++) sum[0][r][v] = multiply_add(sum[0][r][v], sum[c][r][v], one);
            store_elements(h[r] + v * LANES, sum[0][r][v], columns_of(s, v));
        }
}

/* Calls for each number of rows. */
#define UP_TO_3(call) \
    case 1: call(1); break; \
    case 2: call(2); break; \
    case 3: call(3); break;
#define UP_TO_6(call) \
    UP_TO_3(call) \
    case 4: call(4); break; \
    case 5: call(5); break; \
    case 6: call(6); break;

/* Write a @ x for ranks from a's first column on: `width` of them, or LORA_RANKS if there are more. */
static void shrink_rows(
    const element *a, int64_t num_inputs, int64_t rank, int64_t width, const element *const x[], element *const h[],
    int64_t num_rows) {
#define SHRINK(rows, vectors, is_whole) shrink_few(a, num_inputs, x, h, (Shape){rank, width, rows, vectors, is_whole})
#define SHRINK_WHOLE(rows) SHRINK(rows, RANK_VECTORS, 1)
#define SHRINK_PART(rows) SHRINK(rows, RANK_VECTORS, 0)
#define SHRINK_ONE(rows) SHRINK(rows, 1, 0)
    if (width >= LORA_RANKS)
        switch (num_rows) { UP_TO_SHRINK_ROWS(SHRINK_WHOLE) }
    else if (width > LANES)
        switch (num_rows) { UP_TO_SHRINK_ROWS(SHRINK_PART) }
    else
        switch (num_rows) { UP_TO_SHRINK_ROWS(SHRINK_ONE) }
}

/* Return how many of `count` > 0 rows a pass multiplies: at most `most`, and about as many in each. */
INLINE int64_t rows_of_pass(int64_t count, int64_t most) { return ceil_div(count, ceil_div(count, most)); }

void shrink_lora(
    const LoraStack *s, const LoraGroups *g, const element *x, int64_t x_stride, element *h, int64_t piece) {
    int64_t per_part = pieces_of_part(s), first_rank = piece % per_part * LORA_RANKS;
    int64_t tile = piece / per_part / s->num_parts, part = piece / per_part % s->num_parts;
    int64_t count = rows_of_tile(g, tile);
    if (g->slots[tile] < 0 || count == 0) return;
    const LoraPart *p = parts_of_tile(s, g, tile) + part;
    if (first_rank >= p->rank) return;
    const int32_t *rows = g->rows + tile * LORA_TILE;
    h += tile * LORA_TILE * lora_width(s) + part * s->max_rank + first_rank;
    int64_t each = rows_of_pass(count, SHRINK_ROWS);
    for (int64_t row = 0; row < count; row += each) {
        int64_t few = least(each, count - row);
        const element *from[MOST_FEW];
        element *products[MOST_FEW];
        for (int64_t r = 0; r < few; r++) {
            from[r] = x + rows[row + r] * x_stride;
            products[r] = h + (row + r) * lora_width(s);
        }
        shrink_rows(p->a + first_rank, s->num_inputs, p->rank, p->rank - first_rank, from, products, few);
    }
}

/* Add b @ h to float32 sums, or to elements, which are rounded. */
INLINE void expand_few(
    const element *b, int64_t rank, const element *const h[], void *const to[], int64_t at, const Shape s,
    const int is_sums) {
    floats sum[MOST_FEW][MOST_VECTORS];
    UNROLLED for (int r = 0; r < s.num_rows; r++)
        UNROLLED for (int v = 0; v < s.num_vectors; v++) {
            int64_t first = at + v * LANES, count = columns_of(s, v);
            sum[r][v] = is_sums ? load_floats((float *)to[r] + first, count) : load_elements((element *)to[r] + first, count);
        }
    int64_t k = 0;
    for (; k + TOGETHER <= rank; k += TOGETHER) add_inputs(sum, b + at, h, k, s, TOGETHER);
    if (k < rank) add_inputs(sum, b + at, h, k, s, 1);
    UNROLLED for (int r = 0; r < s.num_rows; r++)
        UNROLLED for (int v = 0; v < s.num_vectors; v++) {
            int64_t first = at + v * LANES, count = columns_of(s, v);
            if (is_sums)
                store_floats((float *)to[r] + first, sum[r][v], count);
            else
                store_elements((element *)to[r] + first, sum[r][v], count);
        }
}

INLINE void expand_range(
    const element *b, int64_t stride, int64_t rank, const element *const h[], void *const to[], int64_t count,
    const int num_rows, const int is_sums) {
    const int num_vectors = output_vectors(num_rows);
    int64_t at = 0;
    for (; at + num_vectors * LANES <= count; at += num_vectors * LANES)
        expand_few(b, rank, h, to, at, (Shape){stride, count - at, num_rows, num_vectors, 1}, is_sums);
    for (; at < count; at += LANES) expand_few(b, rank, h, to, at, (Shape){stride, count - at, num_rows, 1, 0}, is_sums);
}

/* Add `count` outputs of b @ h, from b's first column on, to each of few rows. */
static void expand_rows(
    const element *b, int64_t stride, int64_t rank, const element *const h[], void *const to[], int64_t count,
    int64_t num_rows, int is_sums) {
#define TO_SUMS(rows) expand_range(b, stride, rank, h, to, count, rows, 1)
#define TO_OUTPUTS(rows) expand_range(b, stride, rank, h, to, count, rows, 0)
    if (is_sums)
        switch (num_rows) { UP_TO_6(TO_SUMS) }
    else
        switch (num_rows) { UP_TO_6(TO_OUTPUTS) }
}

/* Where b @ h of rows [first_row, end_row) is added, for outputs [first, end). */
typedef struct {
    float *sums;  /* [end_row - first_row, stride], of outputs from `first` on; or NULL */
    element *out; /* [rows, stride], all of them and all outputs; or NULL */
    int64_t stride, first_row, end_row, first, end;
} Expansion;

/* Add b @ h of one part for the tile's rows [first, end). The part's outputs begin with `begin`. */
static void expand_part(
    const LoraStack *s, const LoraGroups *g, const element *h, int64_t tile, int64_t part, int64_t begin, int64_t first,
    int64_t end, const Expansion e) {
    const LoraPart *p = parts_of_tile(s, g, tile) + part;
    int64_t from = e.first > begin ? e.first : begin, to = least(e.end, s->ends[part]);
    if (!p->rank || from >= to) return;
    int64_t each = rows_of_pass(end - first, MOST_FEW);
    for (int64_t index = first; index < end; index += each) {
        int64_t few = least(each, end - index);
        const element *products[MOST_FEW];
        void *outputs[MOST_FEW];
        for (int64_t r = 0; r < few; r++) {
            int64_t row = g->rows[tile * LORA_TILE + index + r];
            products[r] = h + (tile * LORA_TILE + index + r) * lora_width(s) + part * s->max_rank;
            outputs[r] = e.sums ? (void *)(e.sums + (row - e.first_row) * e.stride + from - e.first)
                                : (void *)(e.out + row * e.stride + from);
        }
        expand_rows(
            p->b + from - begin, s->ends[part] - begin, p->rank, products, outputs, to - from, few, e.sums != NULL);
    }
}

static void expand_tile(const LoraStack *s, const LoraGroups *g, const element *h, int64_t tile, const Expansion e) {
    if (g->slots[tile] < 0) return;
    const int32_t *rows = g->rows + tile * LORA_TILE;
    int64_t first = 0, end = rows_of_tile(g, tile);
    while (first < end && rows[first] < e.first_row) first++;
    while (first < end && rows[end - 1] >= e.end_row) end--;
    for (int64_t part = 0, begin = 0; first < end && part < s->num_parts; begin = s->ends[part++])
        expand_part(s, g, h, tile, part, begin, first, end, e);
}

void expand_lora_to_sums(
    const LoraStack *s, const LoraGroups *g, const element *h, float *sums, int64_t stride, int64_t first_row,
    int64_t num_rows, int64_t first, int64_t end) {
    Expansion e = {sums, NULL, stride, first_row, first_row + num_rows, first, end};
    for (int64_t tile = 0; tile < g->num_tiles; tile++) expand_tile(s, g, h, tile, e);
}

void expand_lora(
    const LoraStack *s, const LoraGroups *g, const element *h, element *out, int64_t out_stride, int64_t tile,
    int64_t first, int64_t end) {
    expand_tile(s, g, h, tile, (Expansion){NULL, out, out_stride, 0, INT64_MAX, first, end});
}

API void add_lora(
    const LoraStack *s, const LoraGroups *groups, const element *x, /* [num_rows, num_inputs] */
    element *out,                                                   /* [num_rows, num_outputs] */
    element *h, int64_t x_stride, int64_t out_stride, int32_t num_threads) {
    LoraGroups filled = filled_tiles(groups), *g = &filled;
    int64_t num_outputs = s->ends[s->num_parts - 1], width = MOST_OUTPUTS;
    /* Wide pieces read rows in order; narrower ones give every thread enough of them. */
    while (width > LEAST_OUTPUTS && g->num_tiles * num_outputs < width * num_threads * SHARES) width /= 2;
    int64_t per_tile = ceil_div(num_outputs, width);
    int64_t num_shrinks = shrink_pieces(s, g), num_expands = g->num_tiles * per_tile;
    int64_t shrink_share = num_shrinks / (num_threads * SHARES) + 1, expand_share = num_expands / (num_threads * SHARES) + 1;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
#pragma omp for schedule(dynamic, shrink_share)
        for (int64_t piece = 0; piece < num_shrinks; piece++) shrink_lora(s, g, x, x_stride, h, piece);
#pragma omp for schedule(dynamic, expand_share)
        for (int64_t piece = 0; piece < num_expands; piece++) {
            int64_t first = piece % per_tile * width;
            expand_lora(s, g, h, out, out_stride, piece / per_tile, first, first + width);
        }
    }
}
