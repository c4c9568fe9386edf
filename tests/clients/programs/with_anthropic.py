"""Messages by `anthropic`: python with_anthropic.py URL"""

import asyncio
import sys
from typing import Any

import anthropic

SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"name": "weather", "description": "of a city", "input_schema": SCHEMA}]
ASKED: dict[str, Any] = {"model": "demo", "max_tokens": 2000, "messages": [{"role": "user", "content": "Paris?"}]}


def whole(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**ASKED, system="Be kind", thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[1].text, message.stop_reason) == ("Hello there.", "end_turn")
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (3, 4)
    called = client.messages.create(**ASKED, tools=TOOLS)
    call = called.content[-1]
    assert (call.type, call.name, call.input, called.stop_reason) == (
        "tool_use",
        "weather",
        {"city": "Paris"},
        "tool_use",
    )
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "warm"}
    turns: Any = [
        *ASKED["messages"],
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    assert (
        client.messages.create(**{**ASKED, "messages": turns}, tools=TOOLS).content[-1].text == "The tool says warm"
    )
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        forced = client.messages.create(**ASKED, tools=TOOLS, tool_choice=choice)
        assert [block.type for block in forced.content] == ["tool_use"]
    assert client.messages.count_tokens(model="demo", messages=ASKED["messages"], tools=TOOLS).input_tokens == 12
    place = client.messages.create(**ASKED, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert place.content[0].text == '{"city": "Paris"}'


def streams(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**ASKED, tools=TOOLS) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[2].input == {"city": "Paris"}
    assert {"thinking", "text", "input_json", "message_stop"} <= set(events)
    with client.messages.stream(**ASKED) as stream:
        assert "".join(stream.text_stream) == "Hello there."


def errors(client: anthropic.Anthropic) -> None:
    picture = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    wrong: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"model": "other"}, anthropic.NotFoundError),
        ({"messages": [{"role": "user", "content": [picture]}]}, anthropic.BadRequestError),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, anthropic.BadRequestError),
        ({"extra_body": {"container": "x"}}, anthropic.BadRequestError),
    ]
    for fields, kind in wrong:
        try:
            client.messages.create(**{**ASKED, **fields})
        except kind as error:
            assert error.body["type"] == "error", error.body
        else:
            raise AssertionError(f"{fields} were taken")


async def asynchronous(url: str) -> None:
    client = anthropic.AsyncAnthropic(base_url=url, api_key="none")
    async with client, client.messages.stream(**ASKED) as stream:
        assert await stream.get_final_text() == "Hello there."


def main(url: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        whole(client)
        streams(client)
        errors(client)
    asyncio.run(asynchronous(url))


if __name__ == "__main__":
    main(*sys.argv[1:])
