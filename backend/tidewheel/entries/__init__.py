"""Model repository entries before a server loads them: checks, corrections, and migration from other backends."""
