"""LangChain: ChatOpenAI on chats and on responses, and an agent with a tool on the scripted model."""

from __future__ import annotations

import os
from typing import Any, Literal

os.environ["LANGSMITH_TRACING"] = "false"

import pydantic
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from tally import Tally, from_arguments

SKY = "Why is the sky blue?"
CALL = 'say:<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
ANSWER = "The tool said: 21 degrees in Oslo"


class Report(pydantic.BaseModel):
    """Reports the weather. Bounded, so that any model comes to its end."""

    model_config = pydantic.ConfigDict(extra="forbid")
    sky: Literal["clear", "cloudy", "rain"]
    is_warm: bool


@tool
def weather(city: str) -> str:
    """Tells the weather of a city."""
    return f"21 degrees in {city}"


def main(tally: Tally) -> None:
    asked: Any = {"base_url": tally.api, "api_key": "none", "model": tally.model, "temperature": 0, "max_retries": 0}
    chats(tally, ChatOpenAI(**asked, max_completion_tokens=24))
    structured(tally, ChatOpenAI(**asked, max_completion_tokens=200))
    structured(tally, ChatOpenAI(**asked, max_completion_tokens=200, use_responses_api=True), "responses: ")
    responses(tally, ChatOpenAI(**asked, max_completion_tokens=24, use_responses_api=True))
    asked |= {"base_url": tally.scripted_api, "model": tally.scripted_model}
    agent(tally, "agent with a tool", ChatOpenAI(**asked))
    agent(tally, "responses: agent with a tool", ChatOpenAI(**asked, use_responses_api=True))


def chats(tally: Tally, model: ChatOpenAI) -> None:
    with tally.check("invoke"):
        whole = model.invoke(SKY)
        wanted = {"messages": [{"role": "user", "content": SKY}], "max_tokens": 24, "temperature": 0}
        assert whole.content == tally.post("/v1/chat/completions", wanted)["choices"][0]["message"]["content"]
        assert whole.usage_metadata and whole.usage_metadata["output_tokens"] == 24
        assert whole.response_metadata["finish_reason"] == "length"
    with tally.check("stream"):
        chunks = list(model.stream(SKY))
        assert "".join(str(chunk.content) for chunk in chunks) == whole.content and len(chunks) > 3
    with tally.check("batch"):
        assert [answer.content for answer in model.batch([SKY, SKY])] == [whole.content] * 2
    with tally.check("an answer sent back"):
        assert model.invoke([HumanMessage(SKY), whole, HumanMessage("Go on.")]).content


def responses(tally: Tally, model: ChatOpenAI) -> None:
    with tally.check("responses: invoke"):
        whole = model.invoke(SKY)
        assert whole.text and whole.usage_metadata and whole.usage_metadata["output_tokens"] == 24
    with tally.check("responses: stream"):
        assert "".join(chunk.text for chunk in model.stream(SKY)) == whole.text
    with tally.check("responses: an answer sent back"):
        assert model.invoke([HumanMessage(SKY), whole, HumanMessage("Go on.")]).text


def structured(tally: Tally, model: ChatOpenAI, api: str = "") -> None:
    with tally.check(f"{api}with_structured_output, json_schema"):
        assert isinstance(model.with_structured_output(Report, method="json_schema").invoke(SKY), Report)
    with tally.check(f"{api}with_structured_output, function_calling"):
        assert isinstance(model.with_structured_output(Report, method="function_calling").invoke(SKY), Report)
    with tally.check(f"{api}bind_tools, any"):
        bound = model.bind_tools([Report], tool_choice="any", parallel_tool_calls=False)
        (call,) = bound.invoke(SKY).tool_calls
        assert call["name"] == "Report" and Report.model_validate(call["args"])
    with tally.check(f"{api}bind_tools, stream"):
        total: Any = None
        for chunk in bound.stream(SKY):
            total = chunk if total is None else total + chunk
        (call,) = total.tool_calls
        assert call["name"] == "Report" and Report.model_validate(call["args"])


def agent(tally: Tally, name: str, model: ChatOpenAI) -> None:
    with tally.check(name):
        made = create_agent(model, [weather], system_prompt="Be brief.")
        said = made.invoke({"messages": [{"role": "user", "content": CALL}]})["messages"]
        assert isinstance(said[1], AIMessage) and said[1].tool_calls[0]["args"] == {"city": "Oslo"}
        assert said[-1].text == ANSWER
    with tally.check(f"{name}, stream"):
        steps = list(made.stream({"messages": [{"role": "user", "content": CALL}]}, stream_mode="messages"))
        assert "".join(part.text for part, _ in steps if isinstance(part, AIMessage)) == ANSWER


if __name__ == "__main__":
    main(from_arguments())
