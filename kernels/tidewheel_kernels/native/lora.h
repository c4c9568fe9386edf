/* Adapters of low rank (LoRA). A row's result does not depend on the rows beside it. */
#pragma once

#include "lanes.h"

enum { LORA_TILE = 16 /* rows of one adapter */, LORA_RANKS = 16 /* of a piece of a @ x */ };

typedef struct {
    const element *a; /* transposed: [num_inputs, rank] */
    const element *b; /* transposed: [rank, outputs of the part] */
    int64_t rank;     /* 0: the part has no adapter */
} LoraPart;

typedef struct {
    const LoraPart *parts; /* [num_slots, num_parts] */
    const int64_t *ends;   /* of each part's outputs, [num_parts] */
    int64_t num_parts, num_inputs, max_rank;
} LoraStack;

/* Rows with adapters in tiles. A tile's rows come first, in ascending order; filled tiles come before empty ones. */
typedef struct {
    const int32_t *rows;  /* [num_tiles, LORA_TILE]; negative: padding */
    const int32_t *slots; /* [num_tiles]; negative: an empty tile */
    int64_t num_tiles;
} LoraGroups;

/* Leave out empty tiles at the end, which would make the shares of threads uneven. */
INLINE LoraGroups filled_tiles(const LoraGroups *g) {
    LoraGroups filled = *g;
    while (filled.num_tiles && filled.slots[filled.num_tiles - 1] < 0) filled.num_tiles--;
    return filled;
}

INLINE int64_t rows_of_tile(const LoraGroups *g, int64_t tile) {
    const int32_t *rows = g->rows + tile * LORA_TILE;
    int64_t count = 0;
    while (count < LORA_TILE && rows[count] >= 0) count++;
    return count;
}

INLINE const LoraPart *parts_of_tile(const LoraStack *s, const LoraGroups *g, int64_t tile) {
    return s->parts + g->slots[tile] * s->num_parts;
}

/* Return whether a tile's rows have the adapter of the tile before it. */
INLINE int repeats_slot(const LoraGroups *g, int64_t tile) { return tile > 0 && g->slots[tile] == g->slots[tile - 1]; }

/* Products a @ x of a tile's rows and up to LORA_RANKS ranks are a piece of work. */
INLINE int64_t pieces_of_part(const LoraStack *s) { return ceil_div(s->max_rank, LORA_RANKS); }

INLINE int64_t shrink_pieces(const LoraStack *s, const LoraGroups *g) {
    return g->num_tiles * s->num_parts * pieces_of_part(s);
}

/* Elements of a row of a @ x, which is [num_tiles, LORA_TILE, num_parts, max_rank]. */
INLINE int64_t lora_width(const LoraStack *s) { return s->num_parts * s->max_rank; }

/* Write a piece of a @ x to `h`, rounded to elements, as PEFT does. */
COMPILED_ONCE void shrink_lora(
    const LoraStack *s, const LoraGroups *g, const element *x, int64_t x_stride, element *h, int64_t piece);

/* Add b @ h of a tile's rows to outputs [first, end) of `out` [num_rows, out_stride]. */
COMPILED_ONCE void expand_lora(
    const LoraStack *s, const LoraGroups *g, const element *h, element *out, int64_t out_stride, int64_t tile,
    int64_t first, int64_t end);

/* Add b @ h to the sums [num_rows, stride] of outputs [first, end) of rows from `first_row` on. */
void expand_lora_to_sums(
    const LoraStack *s, const LoraGroups *g, const element *h, float *sums, int64_t stride, int64_t first_row,
    int64_t num_rows, int64_t first, int64_t end);
