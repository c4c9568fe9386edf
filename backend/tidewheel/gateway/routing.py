"""Requests to a backend as its router sees them: from text, since the gateway has no tokenizer."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping

from tidewheel.fleet.router import RouteRequest, chunk_hashes
from tidewheel.gateway.bodies import Ask
from tidewheel.request import Priority
from tidewheel_client import Chunk

BYTES_PER_TOKEN = 4  # of text, roughly; an id takes as many
CHUNK_TOKENS = 256


def route_request(ask: Ask, prompt: Mapping[str, object]) -> RouteRequest:
    """Read tensors of one prompt. Values that the backend will refuse do no harm."""
    data = b"".join(map(_bytes, prompt.values()))
    tenant, salt = (str(ask.params.get(name, "")) for name in ("tenant", "cache_salt"))
    return RouteRequest(
        session=ask.session,
        tenant=tenant,
        priority=_priority(ask.params.get("priority")),
        num_tokens=max(len(data) // BYTES_PER_TOKEN, 1),
        chunks=chunk_hashes(data, CHUNK_TOKENS * BYTES_PER_TOKEN, tenant, salt),
        chunk_tokens=CHUNK_TOKENS,
    )


def cached_tokens(chunks: Iterable[Chunk], route: RouteRequest) -> int | None:
    """Return how much of the prompt was cached, in the tokens of the route. None: the news does not tell."""
    for chunk in chunks:
        if chunk.perf is not None and chunk.index == 0 and chunk.num_input_tokens:
            return route.num_tokens * chunk.perf.num_cached_tokens // chunk.num_input_tokens
    return None


def _bytes(value: object) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    try:
        return array("i", value).tobytes()  # type: ignore[call-overload, no-any-return]
    except (TypeError, OverflowError):
        return b""


def _priority(value: object) -> Priority:
    try:
        return Priority.from_wire(int(str(value or 0)))
    except ValueError:
        return Priority.NORMAL
