"""Finding, starting and supervising a tritonserver."""


class ServeError(Exception):
    """The server cannot start, or a part died. The message says in one line what to change."""
