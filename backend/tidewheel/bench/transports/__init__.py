"""Ways to send a request and see tokens arrive."""
