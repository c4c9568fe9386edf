"""The step loop, its process, and the client of front ends."""
