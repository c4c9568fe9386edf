"""Pictures at `/v1/images/generations`, and speech at `/v1/audio/…`, in OpenAI's forms. Each picture is a request."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Literal

import msgspec
from aiohttp import BodyPartReader, web
from aiohttp.http import HttpProcessingError

from tidewheel.gateway.answers import AnswerWriter, IndexedChunks, Json, as_event, as_typed_event
from tidewheel.gateway.bodies import Fields, OpenAIBody, Prompt, RefusedFields, UpstreamRequest, read_fields
from tidewheel.gateway.upstreams import Attempt
from tidewheel_client import Ask, Chunk, Picture
from tidewheel_client.errors import InvalidRequest, Unsupported

MAX_PICTURES = 10  # of a request, as OpenAI's
MAX_PARTS = 64  # of a form
_PIECE = 1 << 16
_MAX_REASON_CHARS = 200
_REFUSED_OF_PICTURES: RefusedFields = {
    "response_format": ("pictures are not stored: send b64_json, or leave it out", ("b64_json",)),
    "output_format": ("pictures are PNG files: send png, or leave it out", ("png",)),
    "quality": ("send auto, or set steps", ("auto", "standard")),
    "background": ("send opaque, or leave it out", ("auto", "opaque")),
    "moderation": ("there is none: send auto, or leave it out", ("auto", "low")),
}


class ImagesBody(OpenAIBody, frozen=True, kw_only=True):
    prompt: str = ""
    label: int | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_PICTURES)] = 1
    size: str = "auto"  # width x height
    seed: int | None = None  # of the first picture
    stream: bool = False


class ImageAttempt(Attempt):
    def ask(self, params: Mapping[str, object]) -> Ask:
        body = self.request.body
        assert isinstance(body, ImagesBody)
        seed = None if body.seed is None else body.seed + self.index
        return replace(super().ask({**params, "seed": seed}), as_parameters=True)


def read_images(fields: Fields) -> UpstreamRequest:
    body, params = read_fields(fields, ImagesBody, _REFUSED_OF_PICTURES)
    if body.stream and body.n > 1:
        raise Unsupported(f"n is {body.n}: a stream has one picture; send several requests, or stream false")
    prompt: Prompt = {"prompt": body.prompt} if body.prompt else {}
    if body.label is not None:
        prompt["label"] = [body.label]
    params |= {"size": None if body.size == "auto" else body.size, "format": "png_base64"}
    return UpstreamRequest(body=body, prompts=[prompt] * body.n, params=params, stream=body.stream)


class PictureWriter(AnswerWriter):
    def __init__(self, request: UpstreamRequest) -> None:
        super().__init__(request)
        assert isinstance(request.body, ImagesBody)
        self._created, self._num_previews = int(time.time()), 0
        self._format = {"size": request.body.size, "output_format": "png", "background": "opaque", "quality": "auto"}

    def whole(self, chunks: IndexedChunks) -> bytes:
        ends = ((index, chunk.picture) for index, chunk in chunks if chunk.picture and chunk.finish_reason)
        pictures = [picture for _, picture in sorted(ends, key=lambda pair: pair[0])]
        data, usage = [_content(one) for one in pictures], _usage(pictures)
        return msgspec.json.encode({"created": self._created, "data": data, "usage": usage, **self._format})

    def events(self, _: int, chunks: Iterable[Chunk]) -> bytes:
        return b"".join(self._event(chunk.picture, chunk.finish_reason) for chunk in chunks if chunk.picture)

    def _event(self, picture: Picture, finish_reason: str | None) -> bytes:
        kind, more = "image_generation.completed", Json(usage=_usage([picture]))
        if finish_reason is None:
            kind, more = "image_generation.partial_image", Json(partial_image_index=self._num_previews)
            self._num_previews += 1
        event = {"type": kind, "created_at": self._created, **_content(picture), **more, **self._format}
        return as_typed_event(event)


def _content(picture: Picture) -> Json:
    return {"b64_json": picture.png_base64, "step": picture.step, "steps": picture.steps}


def _usage(pictures: Iterable[Picture]) -> Json:
    """Return OpenAI's usage: a step counts as a token."""
    num_steps = sum(picture.step for picture in pictures)
    details = {"input_tokens": 0, "input_tokens_details": {"image_tokens": 0, "text_tokens": 0}}
    return {**details, "output_tokens": num_steps, "total_tokens": num_steps}


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
