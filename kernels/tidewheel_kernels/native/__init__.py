"""CPU kernels in C, compiled on first use for this processor.

Without a compiler, or with `TIDEWHEEL_KERNELS=torch`, plain torch operations do the same.
"""
