"""triton-lang kernels and their launchers, imported only when needed."""
