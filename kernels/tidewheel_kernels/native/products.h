/* Products of small matrices: by AMX tiles if compiled with -DTILES, else in float32 vectors.

   c[ROWS][columns] is, or grows by, a[ROWS][depth] * b[depth][columns]. Columns and depth are multiples of STEP. `b` is
   in lanes, [depth / PER_LANE][columns]: a lane holds PER_LANE successive elements of its column. */
#pragma once

#include "element.h"

enum { ROWS = 32, STEP = 32 };

INLINE int64_t padded(int64_t size) { return (size + STEP - 1) / STEP * STEP; }

#if defined TILES && defined ELEMENT_BFLOAT16 && defined __AMX_BF16__ && defined __AVX512BF16__
#define USES_TILES
#include "tiles.h"

typedef uint16_t operand;
typedef uint32_t lane; /* the first of two bfloat16 numbers is the low half */
enum { PER_LANE = 2 };

INLINE operand as_operand(element x) { return x; }
INLINE lane to_lane(const element x[PER_LANE]) { return x[0] | (lane)x[1] << 16; }

/* Tiles of 16 rows of 64 bytes. */
INLINE void begin_products(void) {
    configure_tiles(
        (uint8_t[NUM_TILES]){16, 16, 16, 16, 16, 16, 16, 16}, (uint16_t[NUM_TILES]){64, 64, 64, 64, 64, 64, 64, 64});
}

INLINE void end_products(void) { _tile_release(); }

INLINE void multiply(const operand *a, const lane *b, float *c, int64_t columns, int64_t depth, int adds) {
    int64_t below = 16 * depth, c_below = 16 * columns;
    for (int64_t n = 0; n < columns; n += STEP) {
        float *at = c + n;
        if (adds) {
            _tile_loadd(0, at, 4 * columns);
            _tile_loadd(1, at + 16, 4 * columns);
            _tile_loadd(2, at + c_below, 4 * columns);
            _tile_loadd(3, at + c_below + 16, 4 * columns);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t k = 0; k < depth; k += STEP) {
            const lane *lanes = b + k / PER_LANE * columns + n;
            _tile_loadd(4, a + k, 2 * depth);
            _tile_loadd(5, a + k + below, 2 * depth);
            _tile_loadd(6, lanes, 4 * columns);
            _tile_loadd(7, lanes + 16, 4 * columns);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, at, 4 * columns);
        _tile_stored(1, at + 16, 4 * columns);
        _tile_stored(2, at + c_below, 4 * columns);
        _tile_stored(3, at + c_below + 16, 4 * columns);
    }
}
#else
typedef float operand, lane;

/* Rows and vectors of a block whose sums stay in registers. */
#if defined __AVX512F__
enum { PER_LANE = 1, VECTOR_BYTES = 64, BLOCK = 8, WIDE = 2 };
#elif defined __AVX__
enum { PER_LANE = 1, VECTOR_BYTES = 32, BLOCK = 4, WIDE = 2 };
#else
enum { PER_LANE = 1, VECTOR_BYTES = 16, BLOCK = 4, WIDE = 2 };
#endif
enum { FLOATS = VECTOR_BYTES / sizeof(float) };
typedef float vector __attribute__((vector_size(VECTOR_BYTES), aligned(4)));

#if defined __x86_64__
#define KEPT(of) __asm__("" : "+v"(of)) /* else gcc reads it again for each row */
#else
#define KEPT(of)
#endif

INLINE operand as_operand(element x) { return load(x); }
INLINE lane to_lane(const element x[PER_LANE]) { return load(x[0]); }
INLINE void begin_products(void) {}
INLINE void end_products(void) {}

INLINE void multiply(const operand *a, const lane *b, float *c, int64_t columns, int64_t depth, int adds) {
    for (int64_t n = 0; n < columns; n += WIDE * FLOATS)
        for (int64_t m = 0; m < ROWS; m += BLOCK) {
            vector sum[BLOCK][WIDE];
            for (int i = 0; i < BLOCK; i++)
                for (int j = 0; j < WIDE; j++)
                    sum[i][j] = adds ? *(vector *)(c + (m + i) * columns + n + j * FLOATS) : (vector){0};
            for (int64_t k = 0; k < depth; k++) {
                vector row[WIDE];
                for (int j = 0; j < WIDE; j++) {
                    row[j] = *(const vector *)(b + k * columns + n + j * FLOATS);
                    KEPT(row[j]);
                }
                for (int i = 0; i < BLOCK; i++)
                    for (int j = 0; j < WIDE; j++) sum[i][j] += a[(m + i) * depth + k] * row[j];
            }
            for (int i = 0; i < BLOCK; i++)
                for (int j = 0; j < WIDE; j++) *(vector *)(c + (m + i) * columns + n + j * FLOATS) = sum[i][j];
        }
}
#endif
