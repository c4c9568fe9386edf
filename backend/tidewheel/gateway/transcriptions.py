"""Speech at `/v1/audio/transcriptions` and `/v1/audio/translations`, in OpenAI's forms."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import BodyPartReader, web
from aiohttp.http import HttpProcessingError

from tidewheel.gateway.answers import AnswerWriter, IndexedChunks, Json, as_event
from tidewheel.gateway.bodies import Fields, OpenAIBody, UpstreamRequest, read_fields
from tidewheel_client import Chunk
from tidewheel_client.errors import InvalidRequest

MAX_PARTS = 64
_PIECE = 1 << 16
_MAX_REASON_CHARS = 200


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
    if fields.get("n", "1") != "1":
        raise InvalidRequest("n is set: a transcription is one text; leave it out")
    body, params = read_fields(fields, SpeechBody, strict=False)
    params |= {"translate": True} if translate else {}
    streams = body.stream or body.response_format == "verbose_json"  # which needs the parts
    return UpstreamRequest(body=body, prompts=[{"audio_file": body.file}], params=params, stream=streams)


class TranscriptWriter(AnswerWriter):
    def __init__(self, request: UpstreamRequest) -> None:
        super().__init__(request)
        assert isinstance(request.body, SpeechBody)
        self._format = request.body.response_format
        self._task = "translate" if request.params.get("translate") else "transcribe"
        request.stream = request.body.stream  # verbose_json is asked in parts, and answered whole
        self._chunks: list[Chunk] = []
        self.content_type = "text/plain; charset=utf-8" if self._format == "text" else "application/json"

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
        if last.language:
            answer["language"] = last.language
        if last.finish_reason != "stop":  # cut short
            answer["finish_reason"] = last.finish_reason
        if self._format == "verbose_json":
            texts: dict[tuple[float, ...], str] = {}
            for chunk in self._chunks:
                times = chunk.seconds or (0.0, 0.0, 0.0)
                texts[times] = texts.get(times, "") + chunk.text
            parts = enumerate(texts.items())
            segments = [{"id": i, "start": times[0], "end": times[1], "text": text} for i, (times, text) in parts]
            answer |= {"task": self._task, "duration": max(texts)[2], "segments": segments}
        return answer
