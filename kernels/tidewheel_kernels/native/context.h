/* Attention of one query per sequence over the paged cache, compiled once in decode_attention.c. */
#pragma once

#include "paged.h"

enum { MAX_HEADS = 8 /* query heads of one KV head per tile */ };

typedef struct {
    Paged paged;
    int64_t begin, end; /* positions of visible keys */
    int64_t q_head_stride;
    float scale, soft_cap;
} Context;

/* Attend with up to MAX_HEADS query heads of one KV head to `out` [num_heads, head_dim]. */
COMPILED_ONCE void attend_any(
    const Context *c, const element *q, element *out, int64_t num_heads, int64_t head_dim);
