"""CPU kernels in C, compiled for this processor by its C compiler when they are first needed, as triton-lang does
with its own. Where there is no compiler, plain torch operations do the same; `TIDEWHEEL_KERNELS=torch` asks for
them.
"""
