"""Triton's `generate` and `generate_stream`, passed on to a server. Its fields and answers are the backend's own."""

from __future__ import annotations

from typing import Any

import msgspec

from tidewheel.gateway.bodies import MAX_PARAMETER_BYTES, Ask
from tidewheel_client.errors import InvalidRequest, RequestError

PATH = "/v2/"
_PROMPTS = ("text_input", "input_ids", "messages")  # a router reads them


def read_generate(fields: dict[str, Any]) -> Ask:
    """Raise `InvalidRequest`."""
    return _read(fields, stream=False)


def read_stream(fields: dict[str, Any]) -> Ask:
    """Raise `InvalidRequest`."""
    return _read(fields, stream=True)


def error_body(error: RequestError) -> bytes:
    return msgspec.json.encode({"error": str(error)})


def _read(fields: dict[str, Any], *, stream: bool) -> Ask:
    fields = _flat(fields)
    params = {name: value for name, value in fields.items() if name not in _PROMPTS}
    if (size := len(msgspec.json.encode(params))) > MAX_PARAMETER_BYTES:
        raise InvalidRequest(f"the parameters have {size} bytes: at most {MAX_PARAMETER_BYTES} are allowed")
    prompt: dict[str, object] = {name: fields[name] for name in _PROMPTS if name in fields}
    session = params.get("session_id")
    return Ask(
        model="",
        prompts=[prompt],
        params=params,
        session=session if isinstance(session, str) else "",
        stream=stream,
    )


def _flat(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with the members of `parameters` moved to the top level, as Triton reads them.

    API keys thus check all of them. Raise `InvalidRequest` if a name is given twice.
    """
    nested = fields.get("parameters", {})
    if not isinstance(nested, dict):
        raise InvalidRequest("parameters must be an object of parameters")
    if twice := sorted(nested.keys() & fields.keys()):
        raise InvalidRequest(f"{twice[0]} stands in parameters and beside it: give it once")
    return {name: value for name, value in fields.items() if name != "parameters"} | nested
