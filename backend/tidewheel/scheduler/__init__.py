"""Who runs next: admission, order, token budget, preemption. Pure Python and numpy, no torch, no clock."""
