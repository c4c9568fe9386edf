/* Configuration of AMX tiles (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18). */
#pragma once

#include <immintrin.h>

#include "element.h"

enum { NUM_TILES = 8 };

/* Finish the stores to memory that tiles read: gcc 12 takes their instructions for such as read none. */
#define FINISH_STORES() __asm__ volatile("" ::: "memory")

INLINE void configure_tiles(const uint8_t rows[NUM_TILES], const uint16_t row_bytes[NUM_TILES]) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int tile = 0; tile < NUM_TILES; tile++) {
        config.row_bytes[tile] = row_bytes[tile];
        config.rows[tile] = rows[tile];
    }
    __asm__ volatile("" ::"r"(&config) : "memory"); /* as FINISH_STORES */
    _tile_loadconfig(&config);
}
