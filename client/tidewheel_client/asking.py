"""Arguments of requests, as both clients read them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from tidewheel_client import codec
from tidewheel_client.answers import Metadata
from tidewheel_client.errors import InternalError, InvalidRequest
from tidewheel_client.transport import Ask

Item = str | Sequence[codec.Message] | Mapping[str, Any]  # of `map`: a prompt, messages, or arguments of `generate`


def is_http(url: str, credentials: object) -> bool:
    """Return whether `url` is that of HTTP endpoints. Raise `InvalidRequest` if the credentials are not for them."""
    if not url.startswith(("http://", "https://")):
        return False
    if credentials is not None:
        raise InvalidRequest(f"credentials are for gRPC, and {url} is HTTP: https in place of http turns on TLS")
    return True


def ask_of(
    model: str,
    prompt: str | None,
    messages: Sequence[codec.Message] | str | None,
    input_ids: Sequence[int] | None,
    request_id: str,
    params: Mapping[str, object],
    *,
    stream: bool = False,
    task: str = "",
) -> Ask:
    """Raise `InvalidRequest`."""
    given = codec.prompt_input(prompt, messages, input_ids)
    if task:
        given["task"] = task
    return Ask(
        model=model, request_id=request_id or uuid.uuid4().hex, prompt=given, params=dict(params), stream=stream
    )


def check_one_sequence(params: Mapping[str, object]) -> None:
    if params.get("n", 1) != 1:
        raise InvalidRequest(f"n is {params['n']!r}: generate_all returns several sequences")


def arguments_of(item: Item, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `generate` for an item of `map`."""
    if isinstance(item, str):
        return {"prompt": item, **params}
    return {**params, **item} if isinstance(item, Mapping) else {"messages": item, **params}


def session_params(session_id: str, ttl_s: float | None, tenant: str) -> dict[str, Any]:
    """Return what each turn of a session sends."""
    params = {"session_id": session_id, "session_ttl_s": ttl_s, "tenant": tenant or None}
    return {name: value for name, value in params.items() if value is not None}


def closing_params(session_id: str, tenant: str) -> dict[str, object]:
    return {"close_session": True, "session_id": session_id, "tenant": tenant}


def embedding_of(chunks: Sequence[Any]) -> tuple[float, ...]:
    embedding: tuple[float, ...] | None = chunks[-1].embedding if chunks else None
    if embedding is None:
        raise InternalError("the answer has no embedding")
    return embedding


def metadata_of(server: Any, model: Any) -> Metadata:
    return Metadata(
        server_version=server.version,
        model=model.name,
        versions=tuple(model.versions),
        platform=model.platform,
        inputs=tuple(tensor.name for tensor in model.inputs),
        outputs=tuple(tensor.name for tensor in model.outputs),
    )
