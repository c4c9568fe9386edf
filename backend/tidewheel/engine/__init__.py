"""Step loop, its process, and its clients."""
