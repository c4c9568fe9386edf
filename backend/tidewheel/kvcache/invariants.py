from __future__ import annotations

from tidewheel.errors import InternalError


def require(condition: bool, message: str) -> None:
    """Raise `InternalError` unless the condition holds, unlike `assert` also under ``python -O``."""
    if not condition:
        raise InternalError(f"invariant broken: {message}")
