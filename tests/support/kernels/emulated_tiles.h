/* AMX tiles in plain C, for `gcc -include`: the instructions of 8-bit integers. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#undef __AMX_INT8__
#define __AMX_INT8__ 1

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

static __thread TileConfig tile_config;
static __thread uint8_t tile_bytes[8][16][64];

static inline void tile_load_config(const void *config) {
    memcpy(&tile_config, config, sizeof tile_config);
    memset(tile_bytes, 0, sizeof tile_bytes);
}
static inline void tile_copy(int tile, uint8_t *memory, int64_t stride, int stores) {
    if (tile_config.palette != 1) __builtin_trap();
    for (int row = 0; row < tile_config.rows[tile]; row++) {
        uint8_t *there = memory + row * stride, *here = tile_bytes[tile][row];
        memcpy(stores ? there : here, stores ? here : there, tile_config.row_bytes[tile]);
    }
}
static inline void tile_multiply(int to, int signed_tile, int unsigned_tile) {
    int depth = tile_config.row_bytes[signed_tile] / 4;
    if (depth != tile_config.rows[unsigned_tile] || tile_config.rows[to] != tile_config.rows[signed_tile]) __builtin_trap();
    for (int row = 0; row < tile_config.rows[to]; row++)
        for (int column = 0; column < tile_config.row_bytes[to] / 4; column++) {
            int32_t sum;
            memcpy(&sum, &tile_bytes[to][row][4 * column], 4);
            for (int k = 0; k < depth; k++)
                for (int i = 0; i < 4; i++)
                    sum += (int8_t)tile_bytes[signed_tile][row][4 * k + i] * tile_bytes[unsigned_tile][k][4 * column + i];
            memcpy(&tile_bytes[to][row][4 * column], &sum, 4);
        }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#define _tile_loadconfig(config) tile_load_config(config)
#define _tile_release() (tile_config.palette = 0)
#define _tile_zero(tile) memset(tile_bytes[tile], 0, sizeof tile_bytes[tile])
#define _tile_loadd(tile, from, stride) tile_copy(tile, (uint8_t *)(from), stride, 0)
#define _tile_stored(tile, to, stride) tile_copy(tile, (uint8_t *)(to), stride, 1)
#define _tile_dpbsud(to, left, right) tile_multiply(to, left, right)
