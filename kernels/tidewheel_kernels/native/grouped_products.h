/* Arithmetic of grouped_matrix.h. */
#pragma once

#include "grouped_matrix.h"

enum { STEPS = GROUP / PER_LANE, STEP_BYTES = OUTPUTS * PER_LANE };

typedef uint16_t halves_t __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint8_t bytes __attribute__((vector_size(VECTOR_BYTES), aligned(1)));

/* Rows of a tile, whose sums stay in registers; and groups that are fetched ahead with little arithmetic, where the
   processor fetches ahead too: with AVX512, slower if told to fetch far; with AVX2, slower if not. */
#if defined __AVX512F__
enum { TILE_ROWS = 6, NEAR = 1 };
#else
enum { TILE_ROWS = 4, NEAR = 3 };
#endif
enum { SHARES = 32 /* of a thread */, MIN_ROWS_TO_SHARE = 4 };

/* Rows of a block share a chunk of weights in the first cache, while the next chunk is fetched. */
enum { BLOCK_ROWS = 64, CHUNK = 8 /* groups */, AHEAD = 16 /* groups, at least a chunk */, AMX_ROWS = 32 };

INLINE int64_t scale_step(Matrix w) { return w.minimums ? 2 * OUTPUTS : OUTPUTS; }

INLINE floats load_halves(const uint16_t *from) {
#if defined __AVX512F__
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined __F16C__
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    /* Without a factor of 2^112, which the compiler may multiply sums by first: they became infinite. */
    ints halves = __builtin_convertvector(*(const halves_t *)from, ints), small = (halves & 0x7c00) == 0; /* finite */
    floats size = (floats)(((halves & 0x7fff) << 13) + (112 << 23) + (small & 1 << 23));
    size -= (floats)(small & (int32_t)to_bits(0x1p-14f));
    return (floats)((ints)size | (halves & 0x8000) << 16);
#endif
}

/* Add the products of each lane's codes, 0 to 15, with its four inputs. */
INLINE ints add_small(ints sum, bytes codes, ints inputs) {
#if defined __AVX512BW__ && defined __AVX512VNNI__
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)inputs);
#elif defined __AVX512BW__
    __m512i pairs = _mm512_maddubs_epi16((__m512i)codes, (__m512i)inputs);
    return sum + (ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#else
    int8_t four[VECTOR_BYTES];
    memcpy(four, &inputs, sizeof four);
    for (int lane = 0; lane < LANES; lane++)
        for (int i = PER_LANE * lane; i < PER_LANE * (lane + 1); i++) sum[lane] += codes[i] * four[i];
    return sum;
#endif
}

/* Add the products of codes from 0 to 255, of which pairs would not fit into 16 bits. */
INLINE ints add_large(ints sum, bytes codes, ints inputs) {
#if defined __AVX512BW__ && defined __AVX512VNNI__
    return add_small(sum, codes, inputs);
#else
    return add_small(sum, codes & 15, inputs) + 16 * add_small((ints){0}, codes >> 4, inputs);
#endif
}

INLINE ints broadcast(const int8_t *four) {
    int32_t inputs;
    memcpy(&inputs, four, sizeof inputs);
    return (ints){0} + inputs;
}

#if defined __AVX2__ && !defined __AVX512F__
INLINE int64_t input_bytes(const int bits) { return bits / 4; }
#else
INLINE int64_t input_bytes(const int bits) { return 1; }
#endif

INLINE const int8_t *inputs_of(Rows x, int64_t row, int64_t group, const int bits) {
    return x.codes + (row * x.num_groups + group) * GROUP * input_bytes(bits);
}

/* `multiply_group` writes the products of one group of inputs and codes. Starts are zero where weights have minimums. */
#if defined __AVX2__ && !defined __AVX512F__
/* A lane has two sums of 16 bits, each of the products of half a group with codes of four bits. */
_Static_assert(GROUP / 2 * 15 * LARGEST <= INT16_MAX, "sums of half a group");

/* Add products in place: gcc would multiply all steps before it adds, and keep the products in memory. */
INLINE void add_pairs(__m256i *sum, __m256i codes, __m256i inputs, const int bits) {
    if (bits == 4)
        *sum = _mm256_add_epi16(*sum, _mm256_maddubs_epi16(codes, inputs));
    else
        *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(codes, inputs));
    __asm__("" : "+x"(*sum));
}

INLINE void multiply_group(
    const uint8_t *codes, Rows x, int64_t group, ints sum[TILE_ROWS][TILE_VECTORS], const int num_rows,
    const int num_vectors, const int bits, const int has_minimums) {
    const __m256i first_bits = bits == 4 ? _mm256_set1_epi8(15) : _mm256_set1_epi16(255);
    __m256i of_pairs[TILE_ROWS][TILE_VECTORS] = {0};
    const int8_t *inputs = inputs_of(x, 0, group, bits);
    const int64_t row_bytes = x.num_groups * GROUP * input_bytes(bits);
    __asm__("" : "+r"(inputs)); /* else each row has two pointers, most of them in memory */
    for (int s = 0; s < STEPS * bits / 8; s++, codes += STEP_BYTES) {
        __m256i first[TILE_VECTORS], second[TILE_VECTORS]; /* of each two codes */
        for (int c = 0; c < num_vectors; c++) {
            __m256i of = _mm256_loadu_si256((const __m256i *)(codes + c * VECTOR_BYTES));
            __asm__("" : "+x"(of)); /* else it is read twice */
            first[c] = _mm256_and_si256(of, first_bits);
            second[c] = _mm256_srli_epi16(of, bits);
            if (bits == 4) second[c] = _mm256_and_si256(second[c], first_bits);
        }
        for (int r = 0; r < num_rows; r++) {
            const int8_t *from = inputs + r * row_bytes + 2 * PER_LANE * s;
            const __m256i firsts = (__m256i)broadcast(from), seconds = (__m256i)broadcast(from + PER_LANE);
            for (int c = 0; c < num_vectors; c++) add_pairs(of_pairs[r] + c, first[c], firsts, bits);
            for (int c = 0; c < num_vectors; c++) add_pairs(of_pairs[r] + c, second[c], seconds, bits);
        }
    }
    for (int r = 0; r < num_rows; r++)
        for (int c = 0; c < num_vectors; c++) {
            const __m256i of = of_pairs[r][c];
            sum[r][c] = (ints)(bits == 4 ? _mm256_madd_epi16(of, _mm256_set1_epi16(1)) : of);
            if (!has_minimums) sum[r][c] += x.starts[r * x.num_groups + group];
        }
}
#else
INLINE void multiply_group(
    const uint8_t *codes, Rows x, int64_t group, ints sum[TILE_ROWS][TILE_VECTORS], const int num_rows,
    const int num_vectors, const int bits, const int has_minimums) {
    for (int r = 0; r < num_rows; r++)
        for (int c = 0; c < num_vectors; c++)
            sum[r][c] = (ints){0} + (has_minimums ? 0 : x.starts[r * x.num_groups + group]);
    for (int s = 0; s < STEPS * bits / 8; s++, codes += STEP_BYTES) {
        bytes of[TILE_VECTORS];
        for (int c = 0; c < num_vectors; c++) of[c] = *(const bytes *)(codes + c * VECTOR_BYTES);
        for (int r = 0; r < num_rows; r++) {
            const int8_t *from = inputs_of(x, r, group, bits) + s * PER_LANE * 8 / bits;
            const ints inputs = broadcast(from);
            if (bits == 8) {
                for (int c = 0; c < num_vectors; c++) sum[r][c] = add_large(sum[r][c], of[c], inputs);
                continue;
            }
            for (int c = 0; c < num_vectors; c++) sum[r][c] = add_small(sum[r][c], of[c] & 15, inputs);
            const ints others = broadcast(from + PER_LANE);
            for (int c = 0; c < num_vectors; c++) sum[r][c] = add_small(sum[r][c], of[c] >> 4, others);
        }
    }
}
#endif

INLINE void prefetch_group(Matrix w, int64_t group, int64_t scales_at, const int num_vectors, const int bits) {
    for (int c = 0; c < num_vectors; c++)
        for (int s = 0; s < STEPS * bits / 8; s++)
            __builtin_prefetch(w.codes + (group * STEPS * bits / 8 + s) * STEP_BYTES + c * VECTOR_BYTES, 0, L2);
    __builtin_prefetch(w.scales + scales_at, 0, L2);
    if (w.minimums) __builtin_prefetch(w.minimums + scales_at, 0, L2);
}

/* Part of the inputs, and which of all row tiles multiplies it: each fetches its share of the next part. */
typedef struct {
    int64_t first_group, end_group, tile, num_tiles;
} Chunk;

/* Add products to `total`. */
INLINE void multiply_tile(
    Matrix w, Rows x, Chunk chunk, float total[][TILE_OUTPUTS], const int num_rows, const int num_vectors,
    const int bits, const int has_minimums) {
    const int64_t shift = __builtin_ctzll(w.group_size / GROUP), step = scale_step(w);
    floats part[TILE_ROWS][TILE_VECTORS];
    for (int r = 0; r < num_rows; r++)
        for (int c = 0; c < num_vectors; c++) part[r][c] = *(const floats *)(total[r] + c * LANES);
    const int64_t ahead = chunk.num_tiles == 1 && num_rows <= bits / 4 ? NEAR : AHEAD;
    int64_t next_fetch = chunk.first_group + chunk.tile;
    for (int64_t group = chunk.first_group; group < chunk.end_group; group++) {
        if (group == next_fetch) {
            prefetch_group(w, group + ahead, ((group + ahead) >> shift) * step, num_vectors, bits);
            next_fetch += chunk.num_tiles;
        }
        ints sum[TILE_ROWS][TILE_VECTORS];
        const uint8_t *codes = w.codes + group * STEPS * bits / 8 * STEP_BYTES;
        multiply_group(codes, x, group, sum, num_rows, num_vectors, bits, has_minimums);
        const int64_t at = (group >> shift) * step;
        for (int c = 0; c < num_vectors; c++) {
            floats scale = load_halves(w.scales + at + c * LANES);
            for (int r = 0; r < num_rows; r++)
                part[r][c] = multiply_add(
                    part[r][c], __builtin_convertvector(sum[r][c], floats), scale * x.scales[r * x.num_groups + group]);
        }
        if (has_minimums)
            for (int c = 0; c < num_vectors; c++) {
                floats minimum = load_halves(w.minimums + at + c * LANES);
                for (int r = 0; r < num_rows; r++)
                    part[r][c] = multiply_add(part[r][c], minimum, (floats){0} + x.sums[r * x.num_groups + group]);
            }
    }
    for (int r = 0; r < num_rows; r++)
        for (int c = 0; c < num_vectors; c++) *(floats *)(total[r] + c * LANES) = part[r][c];
}

/* In registers: gcc would copy an array of words to the stack, and wait for it. */
typedef uint64_t words __attribute__((vector_size(GROUP), aligned(1), may_alias));

/* Move every second of eight bytes to the front. */
INLINE void part_pairs(void *codes) {
    words all = *(words *)codes, even = all & 0x00ff00ff00ff00ff, odd = all >> 8 & 0x00ff00ff00ff00ff;
    even = (even | even >> 8) & 0x0000ffff0000ffff, odd = (odd | odd >> 8) & 0x0000ffff0000ffff;
    *(words *)codes = ((even | even >> 16) & 0xffffffff) | (odd | odd >> 16) << 32;
}

/* Exchange the second and the third of four codes of 16 bits. */
INLINE void exchange_middle(void *codes) {
    for (int i = 0; i < 2; i++) {
        words all = ((words *)codes)[i], moved = (all >> 16 & 0xffff0000) | (all << 16 & 0xffff00000000);
        ((words *)codes)[i] = (all & 0xffff00000000ffff) | moved;
    }
}

INLINE void round_group(const element *from, Rows x, int64_t at, Matrix w) {
    int8_t *codes = x.codes + at * GROUP * input_bytes(w.bits);
    float most = largest_of(from, GROUP), factor = LARGEST / (most > LEAST ? most : LEAST);
    int32_t sum = 0, is_finite = most == most, whole[GROUP];
    for (int i = 0; i < GROUP; i++) whole[i] = is_finite ? (int32_t)rintf(load(from[i]) * factor) : 0;
    for (int i = 0; i < GROUP; i++) sum += whole[i];
    if (input_bytes(w.bits) == 1) {
        for (int i = 0; i < GROUP; i++) codes[i] = (int8_t)whole[i];
        if (w.bits == 4) part_pairs(codes);
    } else {
        for (int i = 0; i < GROUP; i++) ((int16_t *)codes)[i] = (int16_t)whole[i];
        exchange_middle(codes);
    }
    x.scales[at] = most / LARGEST;
    x.sums[at] = x.scales[at] * (float)sum;
    x.starts[at] = w.minimums ? 0 : -sum * (1 << (w.bits - 1));
}

INLINE void store_tile(
    const float tile[][TILE_OUTPUTS], const element *bias, element *out, int64_t out_stride, int64_t num_rows,
    int64_t num_outputs) {
    for (int64_t r = 0; r < num_rows; r++)
        for (int64_t i = 0; i < num_outputs; i++)
            out[r * out_stride + i] = round_to_element(tile[r][i] + (bias ? load(bias[i]) : 0.0f));
}

#define TILE(rows, vectors) \
    case 10 * rows + vectors: multiply_tile(w, x, chunk, total, rows, vectors, bits, has_minimums); break;
#if defined __AVX512F__
#define ROWS_FROM_5(vectors) TILE(5, vectors) TILE(6, vectors)
#else
#define ROWS_FROM_5(vectors)
#endif
#define ANY_ROWS(vectors) TILE(1, vectors) TILE(2, vectors) TILE(3, vectors) TILE(4, vectors) ROWS_FROM_5(vectors)

INLINE void multiply_any_tile(
    Matrix w, Rows x, Chunk chunk, float total[][TILE_OUTPUTS], int64_t num_rows, int64_t num_vectors,
    const int bits, const int has_minimums) {
    switch (10 * num_rows + num_vectors) { ANY_ROWS(1) ANY_ROWS(2) }
}

INLINE Rows rows_from(Rows x, int64_t row, const int bits) {
    int64_t group = row * x.num_groups;
    int8_t *codes = x.codes + group * GROUP * input_bytes(bits);
    return (Rows){codes, x.scales + group, x.sums + group, x.starts + group, x.num_groups};
}

/* Multiply at most BLOCK_ROWS rows, in tiles of nearly as many: one of a single row would unpack codes for it alone. */
INLINE void multiply_rows(
    Matrix w, Rows x, float total[][TILE_OUTPUTS], int64_t num_rows, int64_t num_vectors, const int bits,
    const int has_minimums) {
    const int64_t num_tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS, length = num_tiles > 1 ? CHUNK : x.num_groups;
    memset(total, 0, num_rows * sizeof *total);
    for (int64_t first = 0; first < x.num_groups; first += length) {
        const int64_t end = first + length < x.num_groups ? first + length : x.num_groups;
        for (int64_t tile = 0; tile < num_tiles; tile++) {
            const int64_t row = tile * num_rows / num_tiles, next_row = (tile + 1) * num_rows / num_tiles;
            const Chunk chunk = {first, end, tile, num_tiles};
            multiply_any_tile(
                w, rows_from(x, row, bits), chunk, total + row, next_row - row, num_vectors, bits, has_minimums);
        }
    }
}

#if defined TILES && defined __AMX_INT8__ && defined __AVX512BW__
#define USES_TILES
#include "tiles.h"

/* Tiles 0 to 3 are sums of 16 rows and 16 outputs, 4 and 5 inputs, 6 and 7 weights, each of a group. */
INLINE void begin_products(void) {
    configure_tiles(
        (uint8_t[NUM_TILES]){16, 16, 16, 16, 16, 16, STEPS, STEPS},
        (uint16_t[NUM_TILES]){64, 64, 64, 64, GROUP, GROUP, 64, 64});
}

INLINE void end_products(void) { _tile_release(); }

/* Write the products of a group of inputs with codes of TILE_OUTPUTS outputs. */
INLINE void multiply_codes(
    const uint8_t *codes, const int8_t *inputs, int64_t input_step, ints sums[AMX_ROWS][TILE_VECTORS], const int bits) {
    bytes apart[STEPS][TILE_VECTORS];
    for (int i = 0; bits == 4 && i < STEPS / 2 * TILE_VECTORS; i++) {
        bytes of = *(const bytes *)(codes + i * VECTOR_BYTES);
        apart[i / 2 * 2][i % 2] = of & 15;
        apart[i / 2 * 2 + 1][i % 2] = of >> 4;
    }
    if (bits == 4) codes = (const uint8_t *)apart;
    FINISH_STORES();
    _tile_loadd(4, inputs, input_step);
    _tile_loadd(5, inputs + 16 * input_step, input_step);
    _tile_loadd(6, codes, STEP_BYTES);
    _tile_loadd(7, codes + VECTOR_BYTES, STEP_BYTES);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
    _tile_dpbsud(2, 5, 6);
    _tile_dpbsud(3, 5, 7);
    _tile_stored(0, &sums[0][0], TILE_OUTPUTS * 4);
    _tile_stored(1, &sums[0][1], TILE_OUTPUTS * 4);
    _tile_stored(2, &sums[16][0], TILE_OUTPUTS * 4);
    _tile_stored(3, &sums[16][1], TILE_OUTPUTS * 4);
}

INLINE void multiply_amx_rows(Matrix w, Rows x, float out[AMX_ROWS][TILE_OUTPUTS], const int bits) {
    const int64_t shift = __builtin_ctzll(w.group_size / GROUP), step = scale_step(w);
    floats total[AMX_ROWS][TILE_VECTORS] = {0};
    for (int64_t group = 0; group < x.num_groups; group++) {
        int64_t at = (group >> shift) * step;
        floats scale[TILE_VECTORS], minimum[TILE_VECTORS];
        for (int c = 0; c < TILE_VECTORS; c++, at += LANES) {
            scale[c] = load_halves(w.scales + at);
            minimum[c] = w.minimums ? load_halves(w.minimums + at) : (floats){0};
        }
        ints sums[AMX_ROWS][TILE_VECTORS];
        prefetch_group(w, group + AHEAD, ((group + AHEAD) >> shift) * step, TILE_VECTORS, bits);
        const uint8_t *codes = w.codes + group * STEPS * bits / 8 * STEP_BYTES;
        multiply_codes(codes, x.codes + group * GROUP, w.num_inputs, sums, bits);
        for (int r = 0; r < AMX_ROWS; r++) {
            const int64_t i = r * x.num_groups + group;
            for (int c = 0; c < TILE_VECTORS; c++) {
                floats products = __builtin_convertvector(sums[r][c] + x.starts[i], floats);
                total[r][c] = multiply_add(total[r][c], products, scale[c] * x.scales[i]);
                if (w.minimums) total[r][c] = multiply_add(total[r][c], minimum[c], (floats){0} + x.sums[i]);
            }
        }
    }
    memcpy(out, total, sizeof total);
}
#else
INLINE void begin_products(void) {}
INLINE void end_products(void) {}
#endif

INLINE void multiply_outputs_of(
    Matrix w, Rows x, const element *bias, element *out, int64_t num_rows, int64_t first, const int bits,
    const int has_minimums) {
    const int64_t left = w.num_outputs - first < TILE_OUTPUTS ? w.num_outputs - first : TILE_OUTPUTS;
    const int64_t lane = first % OUTPUTS, block = first / OUTPUTS;
    const int64_t scales_at = block * (w.num_inputs / w.group_size) * scale_step(w) + lane;
    w.codes += block * OUTPUTS * w.num_inputs * bits / 8 + lane * PER_LANE;
    w.scales += scales_at;
    if (w.minimums) w.minimums += scales_at;
    if (bias) bias += first;
    out += first;
    for (int64_t row = 0, count; row < num_rows; row += count) {
        float total[BLOCK_ROWS][TILE_OUTPUTS];
        count = num_rows - row < BLOCK_ROWS ? num_rows - row : BLOCK_ROWS;
#if defined USES_TILES
        if (left > LANES && count >= AMX_ROWS)
            multiply_amx_rows(w, rows_from(x, row, bits), total, bits), count = AMX_ROWS;
        else
#endif
            multiply_rows(
                w, rows_from(x, row, bits), total, count, (left + LANES - 1) / LANES, bits, has_minimums);
        /* Of a constant width without a call of memcpy for each row. */
        if (left == TILE_OUTPUTS)
            store_tile(total, bias, out + row * w.num_outputs, w.num_outputs, count, TILE_OUTPUTS);
        else
            store_tile(total, bias, out + row * w.num_outputs, w.num_outputs, count, left);
    }
}
