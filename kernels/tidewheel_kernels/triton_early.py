import triton
import triton.language as tl


@triton.jit
def wait_for_inputs(STARTS_EARLY: tl.constexpr):
    """Wait for the previous kernel and let the next start. Before this call, read only what no kernel writes."""
    if STARTS_EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
