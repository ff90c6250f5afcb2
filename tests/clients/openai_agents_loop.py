"""openai-agents: a tool that the runner runs on the scripted model, over responses and over chats."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pydantic
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from tally import Tally, from_arguments

SKY = "Why is the sky blue?"
CALL = 'say:<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
HAND_OVER = 'say:<tool_call>{"name": "transfer_to_other", "arguments": {}}</tool_call>'
ANSWER = "The tool said: 21 degrees in Oslo"
KINDS = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}


class Report(pydantic.BaseModel):
    """Bounded, so that any model comes to its end."""

    model_config = pydantic.ConfigDict(extra="forbid")
    sky: Literal["clear", "cloudy", "rain"]
    is_warm: bool


@function_tool
def weather(city: str) -> str:
    """Tells the weather of a city."""
    return f"21 degrees in {city}"


def main(tally: Tally) -> None:
    set_tracing_disabled(True)
    asyncio.run(try_all(tally))


async def try_all(tally: Tally) -> None:
    real = openai.AsyncOpenAI(base_url=tally.api, api_key="none", max_retries=0)
    scripted = openai.AsyncOpenAI(base_url=tally.scripted_api, api_key="none", max_retries=0)
    for name, kind in KINDS.items():
        await answers(tally, name, kind(tally.model, real))
        await loops(tally, name, kind(tally.scripted_model, scripted))


async def answers(tally: Tally, name: str, model: Any) -> None:
    with tally.check(f"{name}: a typed answer"):
        settings = ModelSettings(temperature=0, max_tokens=200)
        agent = Agent("typed", model=model, output_type=Report, model_settings=settings)
        assert isinstance((await Runner.run(agent, SKY)).final_output, Report)


async def loops(tally: Tally, name: str, model: Any) -> None:
    agent = Agent("one", instructions="Be brief.", model=model, tools=[weather])
    with tally.check(f"{name}: a loop with a tool"):
        done = await Runner.run(agent, CALL, max_turns=3)
        assert done.final_output == ANSWER and len(done.raw_responses) == 2
    with tally.check(f"{name}: a second turn"):
        more: Any = [*done.to_input_list(), {"role": "user", "content": "say:bye"}]
        assert (await Runner.run(agent, more)).final_output == "bye"
    with tally.check(f"{name}: a loop with a tool, streamed"):
        run = Runner.run_streamed(agent, CALL, max_turns=3)
        kinds = [event.name async for event in run.stream_events() if event.type == "run_item_stream_event"]
        assert run.final_output == ANSWER and kinds == ["tool_called", "tool_output", "message_output_created"]
    with tally.check(f"{name}: one agent hands over to another"):
        other = Agent("other", model=model)
        first = Agent("first", model=model, handoffs=[handoff(other)])
        assert (await Runner.run(first, HAND_OVER, max_turns=3)).last_agent is other


if __name__ == "__main__":
    main(from_arguments())
