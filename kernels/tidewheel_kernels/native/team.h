/* Work that the threads of a team take in shares. A thread that the system holds up delays the others only while it
   has a share: a stage ends with its last share, not with the last thread. */
#pragma once

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

enum { SPINS = 4096, LINE_BYTES = 64, SHARES_PER_THREAD = 8 };

typedef struct {
    _Alignas(LINE_BYTES) atomic_llong taken;
    atomic_llong done;
} Stage;

/* Take pieces [*first, end) of `total`. Return `end`, or 0 if nothing is left. */
static inline int64_t take_share(Stage *stage, int64_t total, int64_t share, int64_t *first) {
    *first = atomic_fetch_add_explicit(&stage->taken, share, memory_order_relaxed);
    if (*first >= total) return 0;
    return *first + share < total ? *first + share : total;
}

/* Say that `count` pieces are done, and wait for all. */
static inline void finish_stage(Stage *stage, int64_t count, int64_t total) {
    atomic_fetch_add_explicit(&stage->done, count, memory_order_release);
    for (int spins = 0; atomic_load_explicit(&stage->done, memory_order_acquire) < total; spins++)
        if (spins >= SPINS)
            sched_yield(); /* who works may wait for this processor */
        else
#if defined __x86_64__
            __builtin_ia32_pause();
#else
            atomic_signal_fence(memory_order_seq_cst);
#endif
}
