"""Models that answer a request in one step: their signatures, adapters and runner. Without torch."""
