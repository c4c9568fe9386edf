/* Multiply-adds from registers, by the instructions of the products: what arithmetic allows. */
#include "blocked_products.h"
#include "grouped_products.h"

enum { CHAINS = 12 /* more than hide the latency of an instruction */ };

/* Write sums [LANES] of `count` times CHAINS vectors of products. Sums begin apart, or the compiler keeps one. */
API void multiply_integers(const bytes *codes, const int8_t *inputs, ints *sums, int64_t count) {
    ints sum[CHAINS];
#pragma GCC unroll 12
    for (int c = 0; c < CHAINS; c++) sum[c] = (ints){0} + c;
    for (int64_t i = 0; i < count; i++) {
        __asm__ volatile("" : "+r"(inputs)); /* unknown, or sums become products with count */
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) sum[c] = add_small(sum[c], *codes, broadcast(inputs));
    }
#pragma GCC unroll 12
    for (int c = 0; c < CHAINS; c++) *sums += sum[c];
}

API void multiply_floats(const ints *weights, const element *inputs, floats *sums, int64_t count) {
    floats sum[CHAINS];
#pragma GCC unroll 12
    for (int c = 0; c < CHAINS; c++) sum[c] = (floats){0} + (float)c;
    for (int64_t i = 0; i < count; i++) {
        __asm__ volatile("" : "+r"(inputs));
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) sum[c] = add_products(sum[c], *weights, inputs);
    }
#pragma GCC unroll 12
    for (int c = 0; c < CHAINS; c++) *sums += sum[c];
}
