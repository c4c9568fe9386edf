"""Bodies and answers of `/v1/embeddings`."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from tidewheel.gateway.bodies import Ask, WithoutEffect, prompts_of, read_fields
from tidewheel_client import Chunk
from tidewheel_client.errors import InternalError, InvalidRequest

MAX_INPUTS = 2048  # as OpenAI's


class _EmbeddingBody(WithoutEffect, frozen=True, kw_only=True):
    input: str | list[str | int | list[int]]
    model: str = ""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


def read_embeddings(fields: dict[str, Any]) -> Ask:
    """Raise `InvalidRequest` or `Unsupported`."""
    body, params = read_fields(fields, _EmbeddingBody)
    prompts = [prompt | {"task": "embed"} for prompt in prompts_of("input", body.input, MAX_INPUTS)]
    return Ask(body.model, prompts, params)


def embeddings(fields: dict[str, Any], model: str, chunks: Iterable[tuple[int, Chunk]]) -> bytes:
    """Return the answer. Each chunk comes with the number of its input. Raise `InvalidRequest`."""
    data, num_tokens = [], 0
    for number, chunk in sorted(chunks, key=lambda pair: pair[0]):
        if chunk.embedding is None:
            raise InternalError(f"an input has no embedding: it ended with {chunk.finish_reason!r}")
        vector = _cut(chunk.embedding, fields.get("dimensions"))
        value = vector.tolist() if fields.get("encoding_format") != "base64" else _in_base64(vector)
        data.append({"object": "embedding", "index": number, "embedding": value})
        num_tokens += chunk.num_input_tokens or 0
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return msgspec.json.encode({"object": "list", "data": data, "model": model, "usage": usage})


def _cut(vector: tuple[float, ...], dimensions: int | None) -> array[float]:
    """Return the first dimensions, of length 1 again."""
    if dimensions is None:
        return array("f", vector)
    if not 1 <= dimensions <= len(vector):
        raise InvalidRequest(f"dimensions is {dimensions}: the model's embeddings have {len(vector)}")
    kept = vector[:dimensions]
    length = math.sqrt(sum(value * value for value in kept)) or 1.0
    return array("f", (value / length for value in kept))


def _in_base64(vector: array[float]) -> str:
    return base64.b64encode(vector.tobytes()).decode()
