"""Programmatic dependent launch, as kernels see it."""

import triton
import triton.language as tl


@triton.jit
def wait_for_inputs(STARTS_EARLY: tl.constexpr):
    """Wait for the kernel before, and let the next one start early too. Only constants may be read in front of it."""
    if STARTS_EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
