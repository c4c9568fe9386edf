/* Fetches of adapters' matrices while their base is multiplied: with many adapters, a step reads as many bytes of them
   as of the base, and multiplies with few of its rows. */
#pragma once

#include "blocked_products.h"
#include "lora.h"
#include "team.h"

/* First the outputs of a product's tile, then the tile's share of the inputs of the product that follows. */
typedef struct {
    Fetches fetches;
    const LoraGroups *groups;
    const LoraStack *stack, *following;    /* or NULL */
    const char *at, *end;                  /* of the range that is being fetched */
    int64_t length, stride, num_more;      /* `num_more` more ranges of `length` bytes, `stride` apart */
    int64_t part, first, width;            /* of the outputs */
    int64_t row_tile, piece, last_piece;   /* of the next ranges */
    int64_t num_lines;                     /* that a call fetches */
} LoraFetches;

enum { SHARING_ROWS = 32 };

/* Return whether fetches save more time than they take: not where SHARING_ROWS rows of a step come to an adapter. */
INLINE int fetches_pay(const LoraGroups *g, int64_t num_rows) {
    int64_t num_adapters = 0;
    for (int64_t tile = 0; tile < g->num_tiles; tile++) num_adapters += !repeats_slot(g, tile);
    return num_rows < SHARING_ROWS * num_adapters;
}

INLINE void begin_ranges(LoraFetches *f, const element *first, int64_t num_elements, int64_t stride, int64_t count) {
    f->at = (const char *)first, f->length = num_elements * sizeof(element), f->end = f->at + f->length;
    f->stride = stride * sizeof(element), f->num_more = count - 1;
}

/* Start on the next matrix: b of each adapter's first tile of rows, then a of the next product. Return 0 when none is
   left. */
static __attribute__((noinline)) int next_matrix(LoraFetches *f) {
    while (f->stack && f->row_tile < f->groups->num_tiles) {
        int64_t row_tile = f->row_tile++;
        if (repeats_slot(f->groups, row_tile)) continue;
        const LoraPart *p = parts_of_tile(f->stack, f->groups, row_tile) + f->part;
        int64_t begin = f->part ? f->stack->ends[f->part - 1] : 0, num_outputs = f->stack->ends[f->part] - begin;
        if (!p->rank) continue;
        begin_ranges(f, p->b + f->first - begin, f->width, num_outputs, p->rank);
        return 1;
    }
    while (f->piece < f->last_piece) {
        int64_t piece = f->piece++;
        const element *a = shrink_matrix(f->following, f->groups, piece);
        if (!a || repeats_slot(f->groups, piece / pieces_of_tile(f->following))) continue;
        begin_ranges(f, a, LORA_RANKS * f->following->num_inputs, 0, 1);
        return 1;
    }
    return 0;
}

static void fetch_lora(Fetches *fetches) {
    LoraFetches *f = (LoraFetches *)fetches;
    const char *at = f->at, *end = f->end;
    for (int64_t line = 0; line < f->num_lines; line++, at += LINE_BYTES) {
        if (at >= end) {
            if (f->num_more > 0) {
                f->num_more--;
                end += f->stride, at = end - f->length;
            } else {
                f->at = at, f->end = end;
                if (!next_matrix(f)) return;
                at = f->at, end = f->end;
            }
        }
        __builtin_prefetch(at, 0, L2);
    }
    f->at = at, f->end = end;
}

/* `stack` and `following`, of this and the next product, may be NULL. */
INLINE LoraFetches lora_fetches(
    const LoraGroups *g, const LoraStack *stack, const LoraStack *following, const BlockedMatrix *w, int64_t tile,
    int64_t num_rows) {
    LoraFetches f = {{fetch_lora}, g, stack, following};
    f.first = first_of_tile(w, tile), f.width = width_of_tile(w, tile);
    const Passes passes = passes_of(least(num_rows, MOST_ROWS), ceil_div(f.width, LANES));
    int64_t num_calls = passes.num_passes * ceil_div(w->num_inputs, passes.part_inputs), num_bytes = 0;
    if (stack) {
        while (f.part + 1 < stack->num_parts && stack->ends[f.part] <= f.first) f.part++;
        num_bytes += g->num_tiles * stack->max_rank * (f.width * sizeof(element) + LINE_BYTES);
    }
    if (following) {
        int64_t pieces = shrink_pieces(following, g), num_tiles = blocked_tiles(w);
        f.piece = pieces * tile / num_tiles, f.last_piece = pieces * (tile + 1) / num_tiles;
        num_bytes += (f.last_piece - f.piece) * LORA_RANKS * following->num_inputs * sizeof(element);
    }
    f.num_lines = num_bytes / LINE_BYTES / num_calls + 1;
    return f;
}
