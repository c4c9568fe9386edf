"""Finding, starting and supervising a tritonserver."""


class ServeError(Exception):
    """Failed start or dead part of a server, in one line that says what to change."""


class LoadError(ServeError):
    """Failed load of one model, whose name is `model`."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"model {model!r} cannot be loaded: {reason}")
        self.model = model
