/* Callbacks of a product with adapters: they add the adapters' products to its sums, before these are rounded, and fetch
   their matrices meanwhile. With many adapters, a step reads as many bytes of them as of the base, and each multiplies
   few rows. */
#pragma once

#include "blocked_products.h"
#include "lora.h"
#include "team.h"

/* State of a tile of outputs. Fetched are b for these outputs, then the tile's share of a for the product that follows. */
typedef struct {
    Extras extras;
    const LoraGroups *groups;
    const element *products;            /* a @ x */
    const LoraStack *stack, *following; /* of this and the next product; or NULL */
    int64_t part, first, width;         /* of the outputs */
    const char *at, *end;               /* of the range that is being fetched */
    int64_t length, stride, num_more;   /* `num_more` more ranges of `length` bytes, `stride` apart */
    int64_t row_tile, next_a, end_of_a; /* the tile of the next b; numbers of a, by tile of rows and part */
    int64_t num_lines;                  /* that a call fetches */
} LoraExtras;

enum { SHARING_ROWS = 32 };

/* Return whether fetches save more time than they take: not with SHARING_ROWS or more rows for each adapter. */
INLINE int fetches_pay(const LoraGroups *g, int64_t num_rows) {
    int64_t num_adapters = 0;
    for (int64_t tile = 0; tile < g->num_tiles; tile++) num_adapters += !repeats_slot(g, tile);
    return num_rows < SHARING_ROWS * num_adapters;
}

INLINE void begin_ranges(LoraExtras *f, const element *first, int64_t num_elements, int64_t stride, int64_t count) {
    f->at = (const char *)first, f->length = num_elements * sizeof(element), f->end = f->at + f->length;
    f->stride = stride * sizeof(element), f->num_more = count - 1;
}

/* Start on the next matrix: b of each adapter's first tile of rows, then a of the next product. Return 0 when none is
   left. */
static __attribute__((noinline)) int next_matrix(LoraExtras *f) {
    while (f->stack && f->row_tile < f->groups->num_tiles) {
        int64_t row_tile = f->row_tile++;
        if (repeats_slot(f->groups, row_tile)) continue;
        const LoraPart *p = parts_of_tile(f->stack, f->groups, row_tile) + f->part;
        int64_t begin = f->part ? f->stack->ends[f->part - 1] : 0, num_outputs = f->stack->ends[f->part] - begin;
        if (!p->rank) continue;
        begin_ranges(f, p->b + f->first - begin, f->width, num_outputs, p->rank);
        return 1;
    }
    while (f->next_a < f->end_of_a) {
        int64_t row_tile = f->next_a / f->following->num_parts, part = f->next_a++ % f->following->num_parts;
        if (repeats_slot(f->groups, row_tile)) continue;
        const LoraPart *p = parts_of_tile(f->following, f->groups, row_tile) + part;
        if (!p->rank) continue;
        begin_ranges(f, p->a, p->rank * f->following->num_inputs, 0, 1);
        return 1;
    }
    return 0;
}

static void fetch_lora(Extras *extras) {
    LoraExtras *f = (LoraExtras *)extras;
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

static void add_lora_sums(Extras *extras, float total[][WIDE_OUTPUTS], int64_t row, int64_t num_rows) {
    const LoraExtras *f = (const LoraExtras *)extras;
    if (f->stack)
        expand_lora_to_sums(
            f->stack, f->groups, f->products, *total, WIDE_OUTPUTS, row, num_rows, f->first, f->first + f->width);
}

INLINE LoraExtras lora_extras(
    const LoraGroups *g, const element *products, const LoraStack *stack, const LoraStack *following,
    const BlockedMatrix *w, int64_t tile, int64_t num_rows) {
    LoraExtras f = {
        .extras = {.add_to_sums = add_lora_sums},
        .groups = g,
        .products = products,
        .stack = stack,
        .following = following,
        .first = first_of_tile(w, tile),
        .width = width_of_tile(w, tile),
    };
    if (num_rows <= FEW || !fetches_pay(g, num_rows)) return f;
    f.extras.fetch_some = fetch_lora;
    const Passes passes = passes_of(least(num_rows, MOST_ROWS), ceil_div(f.width, LANES));
    int64_t num_calls = passes.num_passes * ceil_div(w->num_inputs, passes.part_inputs), num_bytes = 0;
    if (stack) {
        while (f.part + 1 < stack->num_parts && stack->ends[f.part] <= f.first) f.part++;
        num_bytes += g->num_tiles * stack->max_rank * (f.width * sizeof(element) + LINE_BYTES);
    }
    if (following) {
        int64_t matrices = g->num_tiles * following->num_parts, num_tiles = blocked_tiles(w);
        f.next_a = matrices * tile / num_tiles, f.end_of_a = matrices * (tile + 1) / num_tiles;
        num_bytes += (f.end_of_a - f.next_a) * following->max_rank * following->num_inputs * sizeof(element);
    }
    f.num_lines = num_bytes / LINE_BYTES / num_calls + 1;
    return f;
}
