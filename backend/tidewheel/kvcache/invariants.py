"""How the owners of state in this layer say that they are broken."""

from __future__ import annotations

from tidewheel.errors import InternalError


def require(condition: bool, message: str) -> None:
    """Unlike `assert`, also under ``python -O``: an engine that is idle checks itself."""
    if not condition:
        raise InternalError(f"invariant broken: {message}")
