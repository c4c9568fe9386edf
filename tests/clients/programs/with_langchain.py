"""LangChain's chat models at both APIs: python with_langchain.py URL"""

import sys
from typing import Any

import pydantic
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


class Place(pydantic.BaseModel):
    """A place."""

    city: str


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"warm in {city}"


def check(model: BaseChatModel) -> None:
    assert model.invoke("Hello?").text == "Hello there."
    assert "".join(part.text for part in model.stream("Hello?")) == "Hello there."
    with_tools = model.bind_tools([weather])
    asked: list[Any] = [HumanMessage("Paris?")]
    called = with_tools.invoke(asked)
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Paris"})
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    assert with_tools.invoke([*asked, called, result]).text == "The tool says warm in Paris"
    total = None
    for part in with_tools.stream(asked):
        total = part if total is None else total + part
    assert total is not None
    assert total.tool_calls[0]["args"] == {"city": "Paris"}
    placed = model.with_structured_output(Place, method="json_schema")
    assert placed.invoke("Where?") == Place(city="Paris")


def main(url: str) -> None:
    check(ChatAnthropic(model="demo", base_url=url, api_key="none", max_tokens=100))
    responses = ChatOpenAI(model="demo", base_url=f"{url}/v1", api_key="none", use_responses_api=True)
    check(responses)
    first = responses.invoke("Hello?")
    again = responses.invoke("Hello?", previous_response_id=first.response_metadata["id"])
    assert again.text == "Hello there."
    check(ChatOpenAI(model="demo", base_url=f"{url}/v1", api_key="none"))


if __name__ == "__main__":
    main(*sys.argv[1:])
