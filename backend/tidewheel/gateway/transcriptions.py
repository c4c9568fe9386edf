"""Speech at `/v1/audio/transcriptions` and `/v1/audio/translations`, in OpenAI's forms."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import BodyPartReader, web
from aiohttp.http import HttpProcessingError

from tidewheel.gateway.answers import STREAM_HEADERS, IndexedChunks, Json, as_event
from tidewheel.gateway.bodies import Fields, OpenAIBody, RefusedFields, UpstreamRequest, read_fields
from tidewheel_client import Chunk
from tidewheel_client.errors import InvalidRequest

MAX_PARTS = 64
_PIECE = 1 << 16
_MAX_REASON_CHARS = 200
_REFUSED: RefusedFields = {
    "prompt": ("a transcription takes none: leave it out", ("",)),
    "n": ("a transcription is one text: leave it out", ("1",)),
    "include": ("log-probabilities come over gRPC: leave it out", ("",)),
    "chunking_strategy": ("audio is cut at pauses: send auto", ("auto",)),
    "timestamp_granularities": ("times are those of parts of up to 30 s: send segment", ("segment",)),
}


class SpeechBody(OpenAIBody, frozen=True, kw_only=True):
    file: bytes
    stream: bool = False
    response_format: Literal["json", "text", "verbose_json"] = "json"


async def read_form(http: web.Request) -> Fields:
    """Return the form's texts, and the bytes of its files, by name. Raise `InvalidRequest`."""
    fields: Fields = {}
    size = 0
    try:
        async for part in await http.multipart():
            name = part.name if isinstance(part, BodyPartReader) else None
            if not isinstance(part, BodyPartReader) or not name or len(fields) == MAX_PARTS:
                raise InvalidRequest(f"the form must have 1 to {MAX_PARTS} fields, each with its name")
            data = bytearray()
            while piece := await part.read_chunk(_PIECE):
                data += piece
                size += len(piece)
                if size > http.client_max_size:
                    raise web.HTTPRequestEntityTooLarge(http.client_max_size, size)
            name = name.removesuffix("[]")
            if name in fields:
                raise InvalidRequest(f"{name[:_MAX_REASON_CHARS]} stands twice in the form: send it once")
            fields[name] = bytes(data) if part.filename else data.decode()
    except (ValueError, RuntimeError, HttpProcessingError) as error:
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARS]
        raise InvalidRequest(f"the body is no form that can be read: {reason}") from None
    return fields


def read_speech(fields: Fields, *, translate: bool = False) -> UpstreamRequest:
    if isinstance(fields.get("file"), str):
        raise InvalidRequest("file is text: upload a file, as curl -F file=@NAME does")
    body, params = read_fields(fields, SpeechBody, _REFUSED, strict=False)
    if translate:
        params["translate"] = True
    return UpstreamRequest(body=body, prompts=[{"audio_file": body.file}], params=params, stream=body.stream)


class TranscriptWriter:
    def __init__(self, request: UpstreamRequest) -> None:
        assert isinstance(request.body, SpeechBody)
        self._format = request.body.response_format
        self._task = "translate" if request.params.get("translate") else "transcribe"
        self._language = request.params.get("language")
        self._chunks: list[Chunk] = []
        content_type = "text/plain; charset=utf-8" if self._format == "text" else "application/json"
        kind = STREAM_HEADERS if request.stream else {"Content-Type": content_type}
        self.headers = {"x-request-id": request.request_id, **kind}

    def events(self, _: int, chunks: list[Chunk]) -> bytes:
        self._chunks += chunks
        text = "".join(chunk.text for chunk in chunks)
        return as_event({"type": "transcript.text.delta", "delta": text}) if text else b""

    def end(self) -> bytes:
        return as_event({"type": "transcript.text.done", **self._answer()})

    def whole(self, chunks: IndexedChunks) -> bytes:
        self._chunks = [chunk for _, chunk in chunks]
        answer = self._answer()
        return f"{answer['text']}\n".encode() if self._format == "text" else msgspec.json.encode(answer)

    def _answer(self) -> Json:
        last = self._chunks[-1]
        prompt = last.num_input_tokens or 0
        output = sum(chunk.num_output_tokens or 0 for chunk in self._chunks)
        usage = {"input_tokens": prompt, "output_tokens": output, "total_tokens": prompt + output, "type": "tokens"}
        answer: Json = {"text": "".join(chunk.text for chunk in self._chunks), "usage": usage}
        if last.finish_reason != "stop":  # cut short
            answer["finish_reason"] = last.finish_reason
        if self._format == "verbose_json":
            answer |= {"task": self._task, "language": self._language}
        return answer
