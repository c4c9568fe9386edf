"""`tidewheel bench`: equal requests to any number of targets, timed by the client."""


class BenchError(Exception):
    """Measurement impossible as asked; one line says what to change."""
