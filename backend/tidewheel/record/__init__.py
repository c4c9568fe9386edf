"""Recording of scheduling decisions, for replays and for cost models."""
