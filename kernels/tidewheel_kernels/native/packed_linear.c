/* Product of few rows with weights that oneDNN packed. */
#include "blocked_products.h"

enum { SHARES = 8 /* of a thread: small, so that a late one holds nobody up */ };

API void packed_linear(
    const BlockedMatrix *weights, const element *x, /* [num_rows, num_inputs] */
    const element *bias,                            /* [num_outputs]; or NULL */
    element *out,                                   /* [num_rows, num_outputs] */
    int64_t num_rows, int64_t x_stride, int32_t num_threads) {
    int64_t num_tiles = blocked_tiles(weights), share = num_tiles / (num_threads * SHARES) + 1;
#pragma omp parallel for schedule(dynamic, share) num_threads(num_threads) if (num_threads > 1)
    for (int64_t tile = 0; tile < num_tiles; tile++)
        blocked_outputs(weights, x, x_stride, bias, out, num_rows, tile, NULL);
}

/* Write to `holds` whether the packed weights are the `plain` ones [num_outputs, num_inputs] in the layout described. */
API void packed_as_described(
    const BlockedMatrix *packed, const element *plain, int32_t *holds, int32_t num_threads) {
    int64_t differing = 0;
#pragma omp parallel for num_threads(num_threads) reduction(+ : differing)
    for (int64_t output = 0; output < packed->num_outputs; output++) {
        const element *row = plain + output * packed->num_inputs;
        int64_t block = output / packed->block, lane = output % packed->block;
        const element *from = packed->weights + (block * packed->padded_inputs * packed->block) + lane * PAIR;
        for (int64_t k = 0; k < packed->num_inputs && !differing; k += PAIR)
            differing += memcmp(row + k, from + k * packed->block, PAIR * sizeof(element)) != 0;
    }
    *holds = differing == 0;
}
