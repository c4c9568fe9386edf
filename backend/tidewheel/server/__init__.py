"""Start and supervision of a Triton server."""


class ServeError(Exception):
    """Failed start or dead part of a server; the message says what to change."""


class LoadError(ServeError):
    """Failed load of one model, named `model`."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"model {model!r} cannot be loaded: {reason}")
        self.model = model
        self.reason = reason  # one line
