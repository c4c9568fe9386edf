"""`/v1/images/generations` in OpenAI's form, by models of many steps. Each picture is a request of its own."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated

import msgspec

from tidewheel.gateway.answers import AnswerWriter, IndexedChunks, Json, as_typed_event
from tidewheel.gateway.bodies import Fields, OpenAIBody, Prompt, RefusedFields, UpstreamRequest, read_fields
from tidewheel.gateway.upstreams import Attempt
from tidewheel_client import Ask, Chunk, Picture
from tidewheel_client.errors import Unsupported

MAX_PICTURES = 10  # of a request, as OpenAI's
_REFUSED: RefusedFields = {
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
    body, params = read_fields(fields, ImagesBody, _REFUSED)
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
