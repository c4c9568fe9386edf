"""Responses by `openai`: python with_openai.py URL"""

import asyncio
import sys
from typing import Any

import openai
import pydantic

TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}


class Place(pydantic.BaseModel):
    city: str


def whole(client: openai.OpenAI) -> None:
    first = client.responses.create(model="demo", input="Hello?", instructions="Be kind", reasoning={"effort": "low"})
    assert first.output_text == "Hello there."
    assert first.output[0].content[0].text == "Hm."
    assert first.usage.input_tokens_details.cached_tokens == 4
    second = client.responses.create(model="demo", input="And Paris?", previous_response_id=first.id, tools=[TOOL])
    call = second.output[-1]
    assert (call.type, call.name, call.arguments) == ("function_call", "weather", '{"city": "Paris"}')
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "warm"}
    third = client.responses.create(model="demo", input=[output], previous_response_id=second.id, tools=[TOOL])
    assert third.output_text == "The tool says warm"
    items: Any = [{"role": "user", "content": "And Paris?"}, *second.output, output]
    again = client.responses.create(model="demo", input=items, tools=[TOOL], store=False)
    assert again.output_text == "The tool says warm"
    assert client.responses.retrieve(third.id).output_text == third.output_text
    client.responses.delete(third.id)
    forced = client.responses.create(model="demo", input="Paris?", tools=[TOOL], tool_choice="required")
    assert [item.type for item in forced.output] == ["function_call"]
    some: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    other: Any = TOOL | {"name": "other"}
    allowed = client.responses.create(model="demo", input="Paris?", tools=[TOOL, other], tool_choice=some)
    assert [item.type for item in allowed.output] == ["function_call"]
    assert allowed.tool_choice.mode == "required"


def chats(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Paris?"}]
    tools: Any = [{"type": "function", "function": {"name": name}} for name in ("weather", "other")]
    some: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools[:1]}}
    fields: Any = {"tools": tools, "tool_choice": some, "reasoning_effort": "low", "extra_body": {"priority": "high"}}
    (choice,) = client.chat.completions.create(model="demo", messages=messages, **fields).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]


def streams(client: openai.OpenAI) -> None:
    with client.responses.stream(model="demo", input="Paris?", tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert "response.reasoning_text.delta" in {event.type for event in events}
    parts = client.responses.create(model="demo", input="Hello?", stream=True)
    assert "".join(part.delta for part in parts if part.type == "response.output_text.delta") == "Hello there."
    parsed = client.responses.parse(model="demo", input="Where?", text_format=Place)
    assert parsed.output_parsed == Place(city="Paris")


def errors(client: openai.OpenAI) -> None:
    wrong: list[tuple[dict[str, Any], str | None]] = [
        ({"previous_response_id": "resp_x"}, "previous_response_not_found"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter"),
        ({"background": True}, "unsupported_parameter"),
        ({"extra_body": {"temprature": 1}}, "invalid_value"),
    ]
    for fields, code in wrong:
        try:
            client.responses.create(**{"model": "demo", "input": "x", **fields})
        except openai.BadRequestError as error:
            assert error.code == code, error
        else:
            raise AssertionError(f"{fields} were taken")


async def asynchronous(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = await client.responses.create(model="demo", input="Hello?")
        assert answer.output_text == "Hello there."


def main(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole(client)
        chats(client)
        streams(client)
        errors(client)
    asyncio.run(asynchronous(url))


if __name__ == "__main__":
    main(*sys.argv[1:])
