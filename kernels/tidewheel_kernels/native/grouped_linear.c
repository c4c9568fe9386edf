/* Product of rows with a matrix of 4- or 8-bit integers. Weights share a scale (and a minimum) by output and group of
   inputs; inputs are rounded to 8 bits with a scale by row and group, so that products are of integers. */
#include "element.h"

#if defined __x86_64__
#include <immintrin.h>
#endif

/* LANES outputs lie side by side, in the 32-bit lanes of a vector; a lane holds PER_LANE successive inputs. */
enum { GROUP = 32, LANES = 16, PER_LANE = 4, VECTOR_BYTES = 64, STEPS = GROUP / PER_LANE, LARGEST = 127 };

#define LEAST 0x1p-100f /* magnitude whose reciprocal is finite */

typedef int32_t ints __attribute__((vector_size(VECTOR_BYTES), aligned(4)));
typedef float floats __attribute__((vector_size(VECTOR_BYTES), aligned(4)));
typedef uint16_t halves_t __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint8_t bytes __attribute__((vector_size(VECTOR_BYTES), aligned(1)));

/* Rows and vectors of a tile, whose sums stay in registers. */
#if defined __AVX512F__
enum { TILE_ROWS = 4, TILE_VECTORS = 2 };
#else
enum { TILE_ROWS = 2, TILE_VECTORS = 1 };
#endif
enum { TILE_OUTPUTS = TILE_VECTORS * LANES, AHEAD = 2048 /* bytes to prefetch */, SHARES = 8 /* of a thread */ };

typedef struct {
    const uint8_t *codes;     /* [num_outputs / LANES, num_inputs * bits / 32, LANES, PER_LANE] */
    const uint16_t *scales;   /* [num_outputs / LANES, num_inputs / group_size, LANES] float16 */
    const uint16_t *minimums; /* like scales; or NULL: the middle code stands for 0 */
    int64_t num_outputs, num_inputs, group_size, bits;
} Matrix;

/* Inputs rounded to 8 bits. With weights of 4 bits, every eight are ordered 0, 2, 4, 6, 1, 3, 5, 7: a byte of weights
   holds two successive ones. */
typedef struct {
    const int8_t *codes; /* [num_rows, num_groups, GROUP] */
    const float *scales; /* [num_rows, num_groups] */
    const int32_t *sums; /* of the codes, [num_rows, num_groups] */
    int64_t num_groups;
} Rows;

INLINE floats load_halves(const uint16_t *from) {
#if defined __AVX512F__
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#else
    ints halves = __builtin_convertvector(*(const halves_t *)from, ints); /* finite */
    return (floats)((halves & 0x7fff) << 13) * 0x1p112f * (floats)((halves & 0x8000) << 16 | (int32_t)to_bits(1.0f));
#endif
}

/* Add the products of each lane's codes, 0 to 15, with four inputs. */
INLINE ints add_small(ints sum, bytes codes, int32_t inputs) {
#if defined __AVX512BW__ && defined __AVX512VNNI__
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(inputs));
#elif defined __AVX512BW__
    __m512i pairs = _mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(inputs));
    return sum + (ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined __AVX2__
    union { bytes all; __m256i half[2]; } of = {codes};
    union { ints all; __m256i half[2]; } added;
    for (int i = 0; i < 2; i++) {
        __m256i pairs = _mm256_maddubs_epi16(of.half[i], _mm256_set1_epi32(inputs));
        added.half[i] = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
    return sum + added.all;
#else
    int8_t four[PER_LANE];
    memcpy(four, &inputs, sizeof four);
    for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < PER_LANE; i++) sum[lane] += codes[PER_LANE * lane + i] * four[i];
    return sum;
#endif
}

/* Add the products of codes from 0 to 255, of which pairs would not fit into 16 bits. */
INLINE ints add_large(ints sum, bytes codes, int32_t inputs) {
#if defined __AVX512BW__ && defined __AVX512VNNI__
    return add_small(sum, codes, inputs);
#else
    return add_small(sum, codes & 15, inputs) + 16 * add_small((ints){0}, codes >> 4, inputs);
#endif
}

/* Add the products of one group of inputs, `codes` on, to sums that begin with that of the middle code. */
INLINE void multiply_group(
    const uint8_t *codes, int64_t vector_step, Rows x, int64_t group, int32_t middle,
    ints sum[TILE_ROWS][TILE_VECTORS], const int num_rows, const int num_vectors, const int bits) {
    for (int r = 0; r < num_rows; r++)
        for (int c = 0; c < num_vectors; c++)
            sum[r][c] = (ints){0} - middle * x.sums[r * x.num_groups + group];
    for (int s = 0; s < STEPS * bits / 8; s++, codes += VECTOR_BYTES) {
        bytes of[TILE_VECTORS];
        for (int c = 0; c < num_vectors; c++) {
            of[c] = *(const bytes *)(codes + c * vector_step);
            __builtin_prefetch(codes + c * vector_step + AHEAD);
        }
        for (int r = 0; r < num_rows; r++) {
            int32_t inputs[2];
            const int8_t *from = x.codes + (r * x.num_groups + group) * GROUP;
            memcpy(inputs, from + s * PER_LANE * 8 / bits, PER_LANE * 8 / bits);
            for (int c = 0; c < num_vectors; c++)
                if (bits == 8) {
                    sum[r][c] = add_large(sum[r][c], of[c], inputs[0]);
                } else {
                    sum[r][c] = add_small(sum[r][c], of[c] & 15, inputs[0]);
                    sum[r][c] = add_small(sum[r][c], of[c] >> 4, inputs[1]);
                }
        }
    }
}

INLINE void multiply_tile(
    Matrix w, Rows x, float out[TILE_ROWS][TILE_OUTPUTS], const int num_rows, const int num_vectors, const int bits) {
    const int64_t step = GROUP * LANES * bits / 8, vector_step = x.num_groups * step;
    const int64_t per_scale = w.group_size / GROUP, num_scales = x.num_groups / per_scale;
    const int32_t middle = w.minimums ? 0 : 1 << (bits - 1);
    floats total[TILE_ROWS][TILE_VECTORS];
    for (int r = 0; r < num_rows; r++)
        for (int c = 0; c < num_vectors; c++) total[r][c] = (floats){0};
    for (int64_t i = 0, group = 0; i < num_scales; i++) {
        floats scale[TILE_VECTORS], minimum[TILE_VECTORS];
        for (int c = 0; c < num_vectors; c++) {
            scale[c] = load_halves(w.scales + (c * num_scales + i) * LANES);
            if (w.minimums) minimum[c] = load_halves(w.minimums + (c * num_scales + i) * LANES);
        }
        for (int64_t end = group + per_scale; group < end; group++) {
            ints sum[TILE_ROWS][TILE_VECTORS];
            multiply_group(w.codes + group * step, vector_step, x, group, middle, sum, num_rows, num_vectors, bits);
            for (int r = 0; r < num_rows; r++) {
                float of_row = x.scales[r * x.num_groups + group];
                float offset = of_row * (float)x.sums[r * x.num_groups + group];
                for (int c = 0; c < num_vectors; c++) {
                    total[r][c] += __builtin_convertvector(sum[r][c], floats) * (scale[c] * of_row);
                    if (w.minimums) total[r][c] += minimum[c] * offset;
                }
            }
        }
    }
    for (int r = 0; r < num_rows; r++)
        for (int c = 0; c < num_vectors; c++) *(floats *)(out[r] + c * LANES) = total[r][c];
}

/* Move every second of eight bytes to the front. */
INLINE void part_pairs(int8_t *codes) {
    uint64_t words[GROUP / 8];
    memcpy(words, codes, GROUP);
    for (int i = 0; i < GROUP / 8; i++) {
        uint64_t even = words[i] & 0x00ff00ff00ff00ff, odd = words[i] >> 8 & 0x00ff00ff00ff00ff;
        even = (even | even >> 8) & 0x0000ffff0000ffff, odd = (odd | odd >> 8) & 0x0000ffff0000ffff;
        words[i] = ((even | even >> 16) & 0xffffffff) | (odd | odd >> 16) << 32;
    }
    memcpy(codes, words, GROUP);
}

INLINE void round_group(const element *from, int8_t *codes, float *scale, int32_t *sum, int parts) {
    uint32_t most_bits = 0; /* of magnitudes; those of infinity and NaN are the largest */
#pragma omp simd reduction(max : most_bits)
    for (int i = 0; i < GROUP; i++) {
        uint32_t bits = to_bits(load(from[i])) & 0x7fffffff;
        most_bits = bits > most_bits ? bits : most_bits;
    }
    int is_finite = most_bits < 0x7f800000;
    float most = is_finite ? from_bits(most_bits) : 0.0f, factor = LARGEST / fmaxf(most, LEAST);
    int32_t total = 0;
#pragma omp simd reduction(+ : total)
    for (int i = 0; i < GROUP; i++) {
        int32_t code = is_finite ? (int32_t)rintf(load(from[i]) * factor) : 0;
        codes[i] = (int8_t)code;
        total += code;
    }
    if (parts) part_pairs(codes);
    *scale = is_finite ? most / LARGEST : NAN;
    *sum = total;
}

INLINE void store_tile(
    const float tile[TILE_ROWS][TILE_OUTPUTS], const element *bias, element *out, int64_t out_stride, int64_t num_rows,
    int64_t num_outputs) {
    for (int64_t r = 0; r < num_rows; r++)
        for (int64_t i = 0; i < num_outputs; i++)
            out[r * out_stride + i] = round_to_element(tile[r][i] + (bias ? load(bias[i]) : 0.0f));
}

#define TILE(rows, vectors, bits) \
    case 10 * rows + vectors: multiply_tile(w, x, tile, rows, vectors, bits); break;
#if defined __AVX512F__
#define TILES_OF(bits) \
    TILE(1, 2, bits) TILE(2, 2, bits) TILE(3, 2, bits) TILE(4, 2, bits) \
    TILE(1, 1, bits) TILE(2, 1, bits) TILE(3, 1, bits) TILE(4, 1, bits)
#else
#define TILES_OF(bits) TILE(1, 1, bits) TILE(2, 1, bits)
#endif

INLINE void multiply_any_tile(
    Matrix w, Rows x, float tile[TILE_ROWS][TILE_OUTPUTS], int64_t num_rows, int64_t num_vectors, const int bits) {
    switch (10 * num_rows + num_vectors) { TILES_OF(bits) }
}

/* Outputs from `first` on, at most TILE_OUTPUTS, of all rows. */
INLINE void multiply_rows(
    Matrix w, Rows x, const element *bias, element *out, int64_t num_rows, int64_t first, const int bits) {
    int64_t left = w.num_outputs - first < TILE_OUTPUTS ? w.num_outputs - first : TILE_OUTPUTS;
    w.codes += first * w.num_inputs * bits / 8;
    w.scales += first * (w.num_inputs / w.group_size);
    if (w.minimums) w.minimums += first * (w.num_inputs / w.group_size);
    for (int64_t row = 0; row < num_rows; row += TILE_ROWS) {
        int64_t count = num_rows - row < TILE_ROWS ? num_rows - row : TILE_ROWS, group = row * x.num_groups;
        float tile[TILE_ROWS][TILE_OUTPUTS];
        Rows some = {x.codes + group * GROUP, x.scales + group, x.sums + group, x.num_groups};
        multiply_any_tile(w, some, tile, count, (left + LANES - 1) / LANES, bits);
        store_tile(tile, bias ? bias + first : bias, out + row * w.num_outputs + first, w.num_outputs, count, left);
    }
}

API void grouped_linear(
    const Matrix *matrix, const element *x, /* [num_rows, num_inputs] */
    const element *bias,                    /* [num_outputs]; or NULL */
    element *out,                           /* [num_rows, num_outputs] */
    int32_t *scratch,                       /* for `Rows`: 40 bytes a group */
    int64_t num_rows, int64_t x_stride, int32_t num_threads) {
    Matrix w = *matrix;
    int64_t num_groups = w.num_inputs / GROUP, num_tiles = (w.num_outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS;
    int32_t *sums = scratch;
    float *scales = (float *)(sums + num_rows * num_groups);
    int8_t *codes = (int8_t *)(scales + num_rows * num_groups);
    Rows rows = {codes, scales, sums, num_groups};
    int64_t share = num_tiles / (num_threads * SHARES) + 1; /* small, so that a late thread holds nobody up */
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
#pragma omp for schedule(static) collapse(2)
        for (int64_t row = 0; row < num_rows; row++)
            for (int64_t group = 0; group < num_groups; group++) {
                int64_t i = row * num_groups + group;
                round_group(x + row * x_stride + group * GROUP, codes + i * GROUP, scales + i, sums + i, w.bits == 4);
            }
#pragma omp for schedule(dynamic, share)
        for (int64_t tile = 0; tile < num_tiles; tile++)
            if (w.bits == 8)
                multiply_rows(w, rows, bias, out, num_rows, tile * TILE_OUTPUTS, 8);
            else
                multiply_rows(w, rows, bias, out, num_rows, tile * TILE_OUTPUTS, 4);
    }
}
