"""Agents of pydantic-ai at both APIs: python with_pydantic_ai.py URL"""

import asyncio
import sys

import pydantic
from pydantic_ai import Agent
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Place(pydantic.BaseModel):
    city: str


async def check(model: Model) -> None:
    assert (await Agent(model, instructions="Be kind").run("Hello?")).output == "Hello there."
    agent = Agent(model)

    @agent.tool_plain
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"warm in {city}"

    first = await agent.run("Paris?")
    assert first.output == "The tool says warm in Paris"
    async with Agent(model).run_stream("Hello?") as stream:
        assert "".join([part async for part in stream.stream_text(delta=True)]) == "Hello there."
    async with agent.run_stream_events("Paris?") as stream:
        events = [event async for event in stream]
    assert events[-1].result.output == "The tool says warm in Paris"
    history = first.all_messages()
    assert "Let me look." in str(history)
    placed = await Agent(model, output_type=Place).run("Where?")
    assert placed.output == Place(city="Paris")


async def check_all(url: str) -> None:
    openai = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    anthropic = AnthropicProvider(base_url=url, api_key="none")
    for model in (
        AnthropicModel("demo", provider=anthropic),
        OpenAIResponsesModel("demo", provider=openai),
        OpenAIChatModel("demo", provider=openai),
    ):
        await check(model)


if __name__ == "__main__":
    asyncio.run(check_all(sys.argv[1]))
