"""Live view of a running server: `tidewheel top`."""


class TopError(Exception):
    """No server to show; the message says what to do."""
