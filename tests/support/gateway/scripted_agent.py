"""Answers of a model that thinks, calls a tool once, and then repeats the tool's result, for clients of the gateway.

Requests are checked as the backend checks them.
"""

from __future__ import annotations

import json
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from support.gateway.running_gateway import perf, say, uints
from support.triton.grpc_triton import Answer, Asked, response
from tidewheel.errors import TidewheelError
from tidewheel.frontend.chat import Conversation, parse_conversation
from tidewheel.frontend.request_parameters import ParameterSource, parse_parameters

CALLS: dict[str, Any] = {
    "weather": {"city": "Paris"},
    "Bash": {"command": "echo tide-$((40 + 2))", "description": "Say a word"},  # of claude
    "exec_command": {"cmd": "echo tide-$((40 + 2))"},  # of codex
    "final_result": {"city": "Paris"},  # of pydantic-ai
}
PLACE = '{"city": "Paris"}'


def answer(asked: Asked) -> Answer:
    try:
        if asked.inputs.get("task") == "tokenize":
            parse_conversation(asked.inputs["messages"])
            yield from say(asked, text_output=json.dumps({"count": 12, "tokens": []}))
            return
        parse_parameters((ParameterSource(origin="sampling_parameters", values=asked.sampling),))
        texts = _texts(parse_conversation(asked.inputs["messages"]), asked.sampling)
    except TidewheelError as error:
        yield pb.ModelStreamInferResponse(error_message=str(error))
        return
    *first, last = texts if asked.inputs["stream"] else ["".join(texts)]
    for text in first:
        yield response(
            asked.message,
            text_output=text,
            finish_reason="None",
            num_input_tokens=uints(7),
            num_output_tokens=uints(1),
        )
    yield from say(asked, text_output=last, **perf(4))


def _texts(conversation: Conversation, sampling: dict[str, Any]) -> list[str]:
    last, names = conversation.messages[-1], [tool["function"]["name"] for tool in conversation.tools or []]
    if conversation.calls is not None and conversation.calls.must_call:
        called = conversation.calls.names[0]
        return [json.dumps({"name": called, "arguments": CALLS[called]})]
    if sampling.get("response_format", {}).get("type") == "json_schema":
        return [PLACE[:4], PLACE[4:]]
    texts = ["<think>H", "m.</think>"]
    if last["role"] == "tool":
        return [*texts, "The tool says ", last["content"]]
    called = [name for name in CALLS if name in names]
    if not called:
        return [*texts, "Hello ", "there."]
    call = json.dumps({"name": called[0], "arguments": CALLS[called[0]]})
    return [*texts, "Let me look. ", "<tool_call>", call, "</tool_call>"]
