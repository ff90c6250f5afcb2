"""pydantic-ai: typed answers, and agents that run a tool on the scripted model, over chats and over responses."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pydantic
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from tally import Tally, from_arguments

SKY = "Why is the sky blue?"
CALL = 'say:<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
ANSWER = "The tool said: 21 degrees in Oslo"
KINDS = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}


class Report(pydantic.BaseModel):
    """Bounded, so that any model comes to its end."""

    model_config = pydantic.ConfigDict(extra="forbid")
    sky: Literal["clear", "cloudy", "rain"]
    is_warm: bool


def weather(city: str) -> str:
    """Tells the weather of a city."""
    return f"21 degrees in {city}"


def main(tally: Tally) -> None:
    real = OpenAIProvider(base_url=tally.api, api_key="none")
    scripted = OpenAIProvider(base_url=tally.scripted_api, api_key="none")
    for name, kind in KINDS.items():
        answers(tally, name, kind(tally.model, provider=real))
        loops(tally, name, kind(tally.scripted_model, provider=scripted))


def answers(tally: Tally, name: str, model: Any) -> None:
    settings: Any = {"temperature": 0, "max_tokens": 200}
    for kind in (ToolOutput, NativeOutput):
        with tally.check(f"{name}: {kind.__name__}"):
            agent = Agent(model, output_type=kind(Report), model_settings=settings, retries=0)
            found = agent.run_sync(SKY)
            assert isinstance(found.output, Report) and found.usage.output_tokens > 0


def loops(tally: Tally, name: str, model: Any) -> None:
    agent = Agent(model, tools=[weather], instructions="Be brief.", retries=0)
    with tally.check(f"{name}: agent with a tool"):
        done = agent.run_sync(CALL)
        assert done.output == ANSWER and done.usage.tool_calls == 1 and done.usage.requests == 2
    with tally.check(f"{name}: a second turn"):
        again = agent.run_sync("say:bye", message_history=done.all_messages())
        assert again.output == "bye"
    with tally.check(f"{name}: agent with a tool, stream"):
        assert asyncio.run(streamed(agent)) == ANSWER
    with tally.check(f"{name}: agent with a tool and a schema for its answer"):
        typed = Agent(model, tools=[weather], output_type=NativeOutput(Report), retries=0)
        done = typed.run_sync(CALL)
        assert isinstance(done.output, Report) and done.usage.tool_calls == 1
    with tally.check(f"{name}: agent with a tool and a typed answer"):
        typed = Agent(model, tools=[weather], output_type=ToolOutput(Report), retries=0)
        call = '<tool_call>{"name": "final_result", "arguments": {"sky": "rain", "is_warm": false}}</tool_call>'
        assert typed.run_sync(f"say:{call}").output == Report(sky="rain", is_warm=False)


async def streamed(agent: Agent[None, str]) -> str:
    async with agent.run_stream(CALL) as run:
        pieces = [piece async for piece in run.stream_text(delta=True, debounce_by=None)]
    return "".join(pieces)


if __name__ == "__main__":
    main(from_arguments())
