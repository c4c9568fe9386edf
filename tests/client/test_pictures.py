"""Pictures and their previews, by both clients and over both transports."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import tidewheel_client as tc
from support.triton.grpc_triton import Answer, Asked, FakeTriton, paint, parameters, response
from tidewheel_client import Ask, AsyncClient, Chunk, Client, MockTransport, Picture


def test_progress_comes_step_by_step_and_the_picture_is_returned(triton: FakeTriton, client: Client) -> None:
    triton.answer = lambda asked: paint(asked, 2, 4, 5, of=5)
    seen: list[Picture] = []
    options = {"steps": 5, "seed": None, "priority": 1, "deadline_ms": 9000}
    picture = client.generate_image(label=7, on_progress=seen.append, request_id="me", **options)
    assert [(one.step, one.steps) for one in seen] == [(2, 5), (4, 5), (5, 5)] and picture is seen[-1]
    assert picture.image is not None and picture.image.shape == (2, 1, 1) and picture.image.dtype == np.uint8
    assert [one.image[0, 0, 0] for one in seen if one.image is not None] == [2, 4, 5]
    [asked] = triton.asked
    assert (asked.inputs, asked.message.id) == ({"label": [7]}, "me")
    assert parameters(asked) == {"steps": "5", "qos_class": "1", "deadline_ms": "9000", "partial_images": "10"}


def test_the_asynchronous_client(triton: FakeTriton) -> None:
    triton.answer = lambda asked: paint(asked, 2, 5, of=5)

    async def draw() -> list[int]:
        steps: list[int] = []
        async with AsyncClient(f"127.0.0.1:{triton.port}", timeout_s=30) as client:
            await client.generate_image("a cat", on_progress=lambda one: steps.append(one.step), preview_every=2)
            await client.generate_image()
        return steps

    assert asyncio.run(draw()) == [2, 5]
    assert [asked.inputs for asked in triton.asked] == [{"prompt": "a cat"}, {}]
    assert "partial_images" not in parameters(triton.asked[1])


def test_a_file_in_place_of_an_array(triton: FakeTriton, client: Client) -> None:
    triton.answer = paint
    picture = client.generate_image(label=1, format="png_base64")
    assert picture.image is None and picture.png_base64 == "PNG 20"


def test_a_deadline_s_picture_says_its_step(triton: FakeTriton, client: Client) -> None:
    triton.answer = lambda asked: paint(asked, 12, reason="deadline")
    picture = client.generate_image(label=1, on_deadline="preview", deadline_ms=50)
    assert (picture.step, picture.steps) == (12, 20)


def test_an_exception_of_the_callback_cancels_the_request(triton: FakeTriton, client: Client) -> None:
    def go_on(asked: Asked) -> Answer:
        yield next(iter(paint(asked, 5, 20)))
        triton.ended.wait(30)

    def stop(picture: Picture) -> None:
        raise KeyboardInterrupt(picture.step)

    triton.answer = go_on
    with pytest.raises(KeyboardInterrupt, match="5"):
        client.generate_image(label=1, on_progress=stop)
    assert triton.ended.wait(20)


def test_bad_arguments_are_refused_in_one_line(triton: FakeTriton, client: Client) -> None:
    with pytest.raises(tc.InvalidRequest, match="format is 'png': it must be raw or png_base64"):
        client.generate_image(label=1, format="png")
    for label in (2**31, "seven"):
        with pytest.raises(tc.InvalidRequest, match="label must be a number, an int32"):
            client.generate_image(label=label)  # type: ignore[arg-type]
    triton.answer = lambda asked: iter([response(asked.message, text_output="a", finish_reason="stop")])
    with pytest.raises(tc.InternalError, match="no picture"):
        client.generate_image(label=1)
    with (
        Client("http://127.0.0.1:1") as http,
        pytest.raises(tc.Unsupported, match="give format='png_base64', or use gRPC"),
    ):
        http.generate_image(label=1)


def test_a_mock_draws() -> None:
    def answer(ask: Ask) -> list[Chunk]:
        assert ask.as_parameters and ask.prompt == {"label": [7]}
        return [Chunk(text="", picture=Picture(step=step, steps=2)) for step in (1, 2)]

    steps: list[int] = []
    with Client(transport=MockTransport(answer)) as client:
        assert client.generate_image(label=7, on_progress=lambda one: steps.append(one.step)).step == 2
    assert steps == [1, 2]
