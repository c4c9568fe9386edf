"""Ways to send one request and to see its tokens arrive."""
