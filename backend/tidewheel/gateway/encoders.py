"""Encoders behind `/v1/embeddings`, `/v1/rerank` and `/v1/score`, in the forms of OpenAI, Jina and vLLM.

Each text, or pair of texts, is a request of its own, which the scheduler joins with those of other clients.
"""

import base64
import math
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import msgspec

from tidewheel.gateway.answers import AnswerWriter, IndexedChunks, Json, prompt_usage
from tidewheel.gateway.bodies import MAX_INPUTS, Fields, OpenAIBody, Prompt, UpstreamRequest, prompts_of, read_fields
from tidewheel.gateway.upstream import Upstream
from tidewheel.gateway.upstreams import Attempt
from tidewheel_client import Ask, Chunk, response_codec
from tidewheel_client.errors import InternalError, InvalidRequest, PromptTooLarge

MAX_PAIR_CHARS = 1 << 24  # of all pairs together
_PARAMETERS = ("deadline_ms", "priority", "soft_deadline_ms", "tenant")
_TENSORS = {"query": "query", "text_input": "text"}  # of the encoder, by key of the prompt


class EmbeddingBody(OpenAIBody, frozen=True, kw_only=True):
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


class RerankBody(OpenAIBody, frozen=True, kw_only=True):
    query: str
    documents: list[str]
    top_n: Annotated[int, msgspec.Meta(ge=1)] = MAX_INPUTS
    return_documents: bool = True


class ScoreBody(OpenAIBody, frozen=True, kw_only=True):
    text_1: str | list[str]
    text_2: str | list[str]


class EncoderAttempt(Attempt):
    """Attempt at an encoder, which answers once. For a pair, the chunk's `embedding` holds its score."""

    def ask(self, params: Mapping[str, object]) -> Ask:
        if unknown := sorted(params.keys() - set(_PARAMETERS)):
            raise InvalidRequest(f"{unknown[0]} is set: an encoder takes {', '.join(_PARAMETERS)} beside texts")
        asked = super().ask(params)
        if "input_ids" in asked.prompt:
            raise InvalidRequest("input_ids are token ids: an encoder takes texts")
        tensors = {_TENSORS[name]: asked.prompt[name] for name in _TENSORS.keys() & asked.prompt.keys()}
        return replace(asked, prompt=tensors, as_parameters=True)

    async def send(self, upstream: Upstream) -> AsyncGenerator[list[Chunk]]:
        outputs = response_codec.tensors(await upstream.triton.call("ModelInfer", self.message, None))
        embedding = outputs.get("embedding") or outputs.get("score")
        yield [Chunk(text="", embedding=embedding, num_input_tokens=outputs["num_input_tokens"][0])]


def read_embeddings(fields: Fields) -> UpstreamRequest:
    body, params = read_fields(fields, EmbeddingBody)
    prompts = [prompt | {"task": "embed"} for prompt in prompts_of("input", body.input, MAX_INPUTS)]
    return UpstreamRequest(body=body, prompts=prompts, params=params)


def read_rerank(fields: Fields) -> UpstreamRequest:
    body, params = read_fields(fields, RerankBody)
    return _pairs_request(body, params, "documents", [body.query] * len(body.documents), body.documents)


def read_score(fields: Fields) -> UpstreamRequest:
    body, params = read_fields(fields, ScoreBody)
    first, second = ([texts] if isinstance(texts, str) else texts for texts in (body.text_1, body.text_2))
    first = first * len(second) if len(first) == 1 else first
    if len(first) != len(second):
        raise InvalidRequest(f"text_1 has {len(first)} entries, and text_2 {len(second)}: give one, or as many")
    return _pairs_request(body, params, "text_2", first, second)


def _pairs_request(
    body: OpenAIBody, params: Fields, name: str, queries: Sequence[str], texts: Sequence[str]
) -> UpstreamRequest:
    if not 1 <= len(texts) <= MAX_INPUTS:
        raise InvalidRequest(f"{name} has {len(texts)} entries: it must have 1 to {MAX_INPUTS}")
    if (size := sum(map(len, queries)) + sum(map(len, texts))) > MAX_PAIR_CHARS:
        raise PromptTooLarge(f"{name} makes pairs of {size} characters: at most {MAX_PAIR_CHARS} are allowed")
    prompts: list[Prompt] = [{"query": one, "text_input": other} for one, other in zip(queries, texts, strict=True)]
    return UpstreamRequest(body=body, prompts=prompts, params=params)


class EmbeddingWriter(AnswerWriter):
    def whole(self, chunks: IndexedChunks) -> bytes:
        """Raise `InvalidRequest` for more dimensions than the vectors have."""
        body, data = self.request.body, []
        assert isinstance(body, EmbeddingBody)
        for index, chunk in sorted(chunks, key=lambda pair: pair[0]):
            if chunk.embedding is None:
                raise InternalError(f"an input has no embedding: it ended with {chunk.finish_reason!r}")
            vector = _shortened(chunk.embedding, body.dimensions)
            in_base64 = body.encoding_format == "base64"
            value = base64.b64encode(vector.tobytes()).decode() if in_base64 else vector.tolist()
            data.append({"object": "embedding", "index": index, "embedding": value})
        usage = prompt_usage(chunks)
        return msgspec.json.encode({"object": "list", "data": data, "model": self.request.model_id, "usage": usage})


def _shortened(vector: tuple[float, ...], dimensions: int | None) -> "array[float]":
    if dimensions is None:
        return array("f", vector)
    if not 1 <= dimensions <= len(vector):
        raise InvalidRequest(f"dimensions is {dimensions}: the model's embeddings have {len(vector)}")
    kept = vector[:dimensions]
    length = math.sqrt(sum(value * value for value in kept)) or 1.0
    return array("f", (value / length for value in kept))


class PairWriter(AnswerWriter):
    def whole(self, chunks: IndexedChunks) -> bytes:
        body, request_id = self.request.body, self.request.request_id
        answer = {"model": self.request.model_id, "usage": prompt_usage(chunks)}
        scores = sorted((index, chunk.embedding[0]) for index, chunk in chunks if chunk.embedding)
        if not isinstance(body, RerankBody):
            data = [{"index": index, "object": "score", "score": score} for index, score in scores]
            return msgspec.json.encode({"id": f"score-{request_id}", "object": "list", "data": data, **answer})
        best = sorted(scores, key=lambda pair: -pair[1])[: body.top_n]
        results: list[Json] = [{"index": index, "relevance_score": score} for index, score in best]
        for result in results if body.return_documents else ():
            result["document"] = {"text": body.documents[result["index"]]}
        return msgspec.json.encode({"id": f"rerank-{request_id}", "results": results, **answer})
