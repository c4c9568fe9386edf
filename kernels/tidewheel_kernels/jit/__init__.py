"""triton-lang kernels and their launchers; imported only when a kernel is needed."""
