"""CPU kernels in C, compiled on first use for this processor."""
