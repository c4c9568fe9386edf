/* Vectors of 32-bit lanes, on processors with narrower ones too: outputs lie side by side in the lanes. */
#pragma once

#include "element.h"

#if defined __x86_64__
#include <immintrin.h>
#endif

enum { LANES = 16, VECTOR_BYTES = 64 };

typedef int32_t ints __attribute__((vector_size(VECTOR_BYTES), aligned(4)));
typedef float floats __attribute__((vector_size(VECTOR_BYTES), aligned(4)));
