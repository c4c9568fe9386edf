"""Finding, starting and supervising a tritonserver."""


class ServeError(Exception):
    """Failed start or dead part of a server, in one line that says what to change."""


class CrashLoop(ServeError):
    """Too many deaths, after which another start would not help."""
