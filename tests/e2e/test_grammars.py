"""Structured output through the real server: Triton's inputs, JSON of sampling parameters, and OpenAI's API."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest

from support.triton.serving import Server, StreamError, grpc_inputs, grpc_stream, texts, token_ids

pytestmark = pytest.mark.e2e

PROMPT = "The Python interpreter is"
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
MOST = 700  # answers to these grammars are shorter, whatever is drawn
WHOLE: dict[str, Any] = {"max_tokens": MOST, "return_finish_reason": True, "exclude_input_in_output": True}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "time"}},
]
CHAT: list[Any] = [{"role": "user", "content": "What is the weather?"}]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.openai}/v1", api_key="none", max_retries=0) as one:
        yield one


def asked(server: Server, **parameters: Any) -> str:
    answer = server.generate(PROMPT, **WHOLE, **parameters)
    assert answer["finish_reason"] == "stop"
    return str(answer["text_output"])


@pytest.mark.parametrize(
    ("guide_type", "guide", "check"),
    [
        ("json_schema", json.dumps(CITY), lambda text: jsonschema.validate(json.loads(text), CITY)),
        ("regex", "[A-Z][a-z]{3} [0-9]{2}", lambda text: re.fullmatch("[A-Z][a-z]{3} [0-9]{2}", text)[0]),
        ("ebnf_grammar", 'root ::= "(" [ab]{2} ")"', lambda text: re.fullmatch(r"\([ab]{2}\)", text)[0]),
    ],
)
def test_names_of_tensorrt_llm(server: Server, guide_type: str, guide: str, check: Callable[[str], object]) -> None:
    check(asked(server, guided_decoding_guide_type=guide_type, guided_decoding_guide=guide))


@pytest.mark.parametrize(
    "parameters",
    [
        {"guided_choice": ["yes", "no"]},
        {"structured_outputs": {"regex": "yes|no"}},
        {"guided_decoding": {"choice": ["no"]}},
    ],
    ids=str,
)
def test_names_of_vllm(server: Server, parameters: dict[str, Any]) -> None:
    sampling = json.dumps({**parameters, "max_tokens": 5})
    results = grpc_stream(server, grpc_inputs(PROMPT, stream=True, sampling_parameters=sampling))
    assert "".join(texts(results)) in ("yes", "no")


def test_openai_formats(client: openai.OpenAI) -> None:
    def answer(response_format: Any) -> Any:
        return client.chat.completions.create(
            model="demo", messages=CHAT, response_format=response_format, max_tokens=MOST
        ).choices[0]

    city = answer({"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}})
    assert city.finish_reason == "stop"
    jsonschema.validate(json.loads(city.message.content), CITY)
    anything = answer({"type": "json_object"})
    assert anything.message.content.startswith("{")
    assert anything.finish_reason == "length" or isinstance(json.loads(anything.message.content), dict)


def test_scored_prompts_and_allowed_tokens(client: openai.OpenAI) -> None:
    """An answer goes as far as its grammar and its allowed tokens agree."""

    def ids_of(text: str) -> list[int]:
        body = {"prompt": text, "add_special_tokens": False}
        return list(client.post("../tokenize", body=body, cast_to=dict[str, Any])["tokens"])

    def answer(allowed: list[int]) -> Any:
        rules = {"guided_regex": "[13]{3}2?3", "allowed_token_ids": allowed}
        return client.completions.create(
            model="demo", prompt=PROMPT, echo=True, logprobs=0, max_tokens=4, extra_body=rules
        ).choices[0]

    one, three = (ids_of(digit)[-1] for digit in "13")
    found = answer([one, three])
    assert re.fullmatch(f"{PROMPT}[13]{{3}}3", found.text)
    assert len(found.logprobs.tokens) == len(ids_of(PROMPT)) + 4
    with pytest.raises(openai.BadRequestError, match=r"could follow 3 tokens of output: .*allowed_token_ids"):
        answer([one])
    with pytest.raises(openai.BadRequestError, match="guided_regex does not go with the task embed"):
        client.embeddings.create(model="demo", input="a", extra_body={"guided_regex": "a"})


@pytest.mark.parametrize("stream", [False, True])
def test_forced_calls(client: openai.OpenAI, stream: bool) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    for choice in (named, "required"):
        answer: Any = client.chat.completions.create(
            model="demo", messages=CHAT, tools=TOOLS, tool_choice=choice, max_tokens=MOST, stream=stream
        )
        if stream:
            deltas = [event.choices[0] for event in answer]
            calls = [call for part in deltas for call in part.delta.tool_calls or ()]
            reason = deltas[-1].finish_reason
        else:
            calls, reason = answer.choices[0].message.tool_calls, answer.choices[0].finish_reason
        (name,) = (call.function.name for call in calls if call.function.name)
        arguments = json.loads("".join(call.function.arguments for call in calls))
        assert reason == "tool_calls"
        if name == "weather":
            jsonschema.validate(arguments, CITY)
        else:
            assert (name, arguments) == ("time", {})


def test_hostile_grammars_end_alone(server: Server) -> None:
    """Beside a stream whose tokens stay what they are."""
    depth = "\n".join(f'r{i} ::= "x" r{i + 1}' for i in range(5000))
    many = [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(9)]} for i in range(12)]
    wrong: list[dict[str, Any]] = [
        {"guided_grammar": f'root ::= r0\n{depth}\nr5000 ::= "a"'},
        {"guided_json": {"$ref": "#"}},
        {"guided_json": {"allOf": many}},
    ]
    wild = [{"guided_regex": r"(\p{L}{1,50}\p{N}?){1,200}"}, {"guided_regex": "(((a{1,99}){1,99}){1,99}){1,99}"}]
    distinct = [{"guided_regex": f"(a|b{{{i}}}){{{i}}}c*"} for i in range(1, 80)]

    def error_of(parameters: dict[str, Any]) -> str:
        sampling = json.dumps({**parameters, "max_tokens": 20})
        try:
            grpc_stream(server, grpc_inputs(PROMPT, sampling_parameters=sampling))
        except StreamError as error:
            return str(error)
        return ""

    plain: dict[str, Any] = {"max_tokens": 100, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    expected = token_ids(grpc_stream(server, grpc_inputs(PROMPT, stream=True, **plain)))
    with ThreadPoolExecutor(8) as pool:
        errors = pool.map(error_of, [*wrong, *wild, *distinct])
        assert token_ids(grpc_stream(server, grpc_inputs(PROMPT, stream=True, **plain))) == expected
        found = list(errors)
    assert all(error.startswith("[TW-INPUT]") for error in found[:3])
    assert all(not error or "grammar has become too complex" in error for error in found[3:5])
    assert not any(found[5:])


def test_strict_tools(client: openai.OpenAI) -> None:
    """The model may call; a schema that cannot be followed is refused by its function's name, another grammar too."""

    def ask(parameters: Any, **fields: Any) -> Any:
        function = {"name": "weather", "parameters": parameters, "strict": True}
        tools: Any = [{"type": "function", "function": function}]
        return client.chat.completions.create(model="demo", messages=CHAT, tools=tools, max_tokens=40, **fields)

    assert ask(CITY).choices[0].finish_reason in ("stop", "length", "tool_calls")
    with pytest.raises(openai.BadRequestError, match="tools: parameters of weather: maximum is 1e") as caught:
        ask({"type": "object", "properties": {"n": {"type": "number", "maximum": 1e300}}})
    assert caught.value.param == "tools"
    with pytest.raises(openai.BadRequestError, match="response_format is set, and a grammar of tools too"):
        ask(CITY, response_format={"type": "json_object"})
