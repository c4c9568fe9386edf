"""The step loop, the process it runs in, and the client that front ends talk to it with."""
