"""Bodies and answers of `/tokenize` and `/detokenize`, in the shapes of vLLM's server.

The backend's front end owns the tokenizer and does the work, in its processes with limits: a second copy here could
differ, and would read a model's files for a client.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tidewheel.gateway.bodies import Ask, conversation, read_fields
from tidewheel_client.errors import InvalidRequest


class _TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str = ""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = []
    chat_template_kwargs: dict[str, Any] = {}


class _DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str = ""
    tokens: list[int]


def read_tokenize(fields: dict[str, Any]) -> Ask:
    """Raise `InvalidRequest` or `Unsupported`."""
    body, params = read_fields(fields, _TokenizeBody)
    if (body.prompt is None) is (body.messages is None):
        raise InvalidRequest("prompt or messages: send one of them")
    if body.messages is None:
        if body.tools or body.chat_template_kwargs:
            raise InvalidRequest("tools and chat_template_kwargs go with messages: leave them out")
        prompt: dict[str, object] = {"text_input": body.prompt}
    else:
        prompt = conversation(body.messages, body.tools, body.chat_template_kwargs)
    return Ask(body.model, [prompt | {"task": "tokenize"}], params)


def read_detokenize(fields: dict[str, Any]) -> Ask:
    """Raise `InvalidRequest` or `Unsupported`."""
    body, params = read_fields(fields, _DetokenizeBody)
    if not body.tokens:
        return Ask(body.model, [], params)
    return Ask(body.model, [{"input_ids": body.tokens, "task": "detokenize"}], params)


def tokenized(text: str) -> bytes:
    return text.encode()  # JSON already


def detokenized(text: str) -> bytes:
    return msgspec.json.encode({"prompt": text})
