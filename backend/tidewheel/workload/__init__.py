"""Offered work: arrival times, lengths in tokens, and traces of requests."""
