/* Work that the threads of a team take in shares. A thread that the system holds up delays the others only while it
   has a share: a stage ends with its last share, not with the last thread. Threads begin in regions of their own (some
   in one, above MOST_REGIONS), so that each reads memory in order, and then help with the others. */
#pragma once

#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

enum { SPINS = 4096, LINE_BYTES = 64, SHARES_PER_THREAD = 8 };
enum { MOST_REGIONS = LINE_BYTES / sizeof(long long) - 1 }; /* a stage is one cache line */

typedef struct {
    _Alignas(LINE_BYTES) atomic_llong taken[MOST_REGIONS]; /* of each region; in the end more than it has */
    atomic_llong done;
} Stage;

/* Take pieces [*first, end) of `total`. Return `end`, or 0 if nothing is left. */
static inline int64_t take_share(Stage *stage, int64_t total, int64_t share, int64_t num_threads, int64_t *first) {
    const int64_t num_regions = num_threads < MOST_REGIONS ? num_threads : MOST_REGIONS, own = omp_get_thread_num();
    for (int64_t i = 0; i < num_regions; i++) {
        const int64_t region = (own + i) % num_regions;
        const int64_t begin = total * region / num_regions, end = total * (region + 1) / num_regions;
        *first = begin + atomic_fetch_add_explicit(&stage->taken[region], share, memory_order_relaxed);
        if (*first < end) return *first + share < end ? *first + share : end;
    }
    return 0;
}

/* Say that `count` pieces are done, and wait for all `total`. */
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
