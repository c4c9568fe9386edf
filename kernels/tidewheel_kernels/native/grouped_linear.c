/* Product of rows with weights of 4 or 8 bits. */
#include "grouped_products.h"

void round_groups(const element *from, Rows x, int64_t at, int64_t count, const Matrix *w) {
    for (int64_t group = 0; group < count; group++) round_group(from + group * GROUP, x, at + group, *w);
}

void multiply_outputs(const Matrix *w, Rows x, const element *bias, element *out, int64_t num_rows, int64_t first) {
    if (w->bits == 8)
        multiply_outputs_of(*w, x, bias, out, num_rows, first, 8, w->minimums != NULL);
    else if (w->minimums)
        multiply_outputs_of(*w, x, bias, out, num_rows, first, 4, 1);
    else
        multiply_outputs_of(*w, x, bias, out, num_rows, first, 4, 0);
}

API void grouped_linear(
    const Matrix *w, const element *x, /* [num_rows, num_inputs] */
    const element *bias,               /* [num_outputs]; or NULL */
    element *out,                      /* [num_rows, num_outputs] */
    float *scratch,                    /* for `Rows`: 76 bytes a group */
    int64_t num_rows, int64_t x_stride, int32_t num_threads) {
    int64_t num_groups = w->num_inputs / GROUP, num_tiles = (w->num_outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS;
    int64_t size = num_rows * num_groups;
    Rows rows = {(int8_t *)(scratch + 3 * size), scratch, scratch + size, (int32_t *)scratch + 2 * size, num_groups};
    int64_t share = num_tiles / (num_threads * SHARES) + 1; /* small, so that a late thread holds nobody up */
    int shares_rounding = num_threads > 1 && num_rows >= MIN_ROWS_TO_SHARE;
#pragma omp parallel for num_threads(num_threads) if (shares_rounding)
    for (int64_t row = 0; row < num_rows; row++)
        round_groups(x + row * x_stride, rows, row * num_groups, num_groups, w);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        if (num_rows >= AMX_ROWS) begin_products();
#pragma omp for schedule(dynamic, share)
        for (int64_t tile = 0; tile < num_tiles; tile++)
            multiply_outputs(w, rows, bias, out, num_rows, tile * TILE_OUTPUTS);
        if (num_rows >= AMX_ROWS) end_products();
    }
}

INLINE void copy_output(Matrix w, int64_t output, element *to) {
    int64_t block = output / OUTPUTS, lane = output % OUTPUTS, num_scales = w.num_inputs / w.group_size;
    const uint8_t *codes = w.codes + block * w.num_inputs * w.bits / 8 * OUTPUTS + lane * PER_LANE;
    for (int64_t group = 0; group < num_scales; group++) {
        int64_t at = (block * num_scales + group) * scale_step(w) + lane / LANES * LANES;
        float scale = load_halves(w.scales + at)[lane % LANES];
        float minimum = w.minimums ? load_halves(w.minimums + at)[lane % LANES] : -scale * (float)(1 << (w.bits - 1));
        for (int64_t i = group * w.group_size; i < (group + 1) * w.group_size; i++) {
            int64_t byte = i * w.bits / 8;
            uint8_t code = codes[byte / PER_LANE * STEP_BYTES + byte % PER_LANE];
            if (w.bits == 4) code = i % 2 ? code >> 4 : code & 15;
            to[i] = round_to_element((float)code * scale + minimum);
        }
    }
}

API void grouped_embedding(
    const Matrix *matrix, const int64_t *outputs, /* [num_rows] */
    element *to,                                  /* [num_rows, num_inputs] */
    int64_t num_rows, int32_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows >= MIN_ROWS_TO_SHARE)
    for (int64_t row = 0; row < num_rows; row++)
        copy_output(*matrix, outputs[row], to + row * matrix->num_inputs);
}
