"""The openai SDK for Python: what its users do, on chat and text completions, responses and models."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pydantic
from openai.types.chat import ChatCompletion
from tally import Tally, from_arguments

SKY: Any = [{"role": "user", "content": "Why is the sky blue?"}]
FRANCE = "The capital of France is"
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
AGENT: Any = [
    {"role": "developer", "content": "Answer briefly."},
    {"role": "user", "content": [{"type": "text", "text": "How warm is it in Paris?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"},
]
SHELL: Any = {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}}


class Weather(pydantic.BaseModel):
    """Bounded, so that any model comes to its end."""

    model_config = pydantic.ConfigDict(extra="forbid")
    sky: Literal["clear", "cloudy", "rain"]
    is_warm: bool
    degrees: int = pydantic.Field(ge=-50, le=50)


def main(tally: Tally) -> None:
    with client_of(tally) as client:
        chat(tally, client)
        options(tally, client)
        structured(tally, client)
        completions(tally, client)
        responses(tally, client)
        around(tally, client)
    with openai.OpenAI(base_url=tally.scripted_api, api_key="none", max_retries=0) as client:
        loops(tally, client)
    with tally.check("async client"):
        assert asyncio.run(ask_async(tally)) == greedy(tally, client_of(tally)).choices[0].message.content


def client_of(tally: Tally) -> openai.OpenAI:
    return openai.OpenAI(base_url=tally.api, api_key="none", max_retries=0)


def greedy(tally: Tally, client: openai.OpenAI, **more: Any) -> Any:
    fields = {"model": tally.model, "messages": SKY, "max_tokens": 24, "temperature": 0, **more}
    return client.chat.completions.create(**fields)


def chat(tally: Tally, client: openai.OpenAI) -> None:
    with tally.check("chat"):
        whole: ChatCompletion = greedy(tally, client)
        assert whole.choices[0].finish_reason == "length" and whole.choices[0].message.role == "assistant"
        assert whole.usage and whole.usage.completion_tokens == 24
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + 24
    with tally.check("chat, stream"):
        chunks = [chunk.choices[0] for chunk in greedy(tally, client, stream=True)]
        assert "".join(choice.delta.content or "" for choice in chunks) == whole.choices[0].message.content
        assert chunks[0].delta.role == "assistant" and chunks[-1].finish_reason == "length"
    with tally.check("stream with usage"):
        last = list(greedy(tally, client, stream=True, stream_options={"include_usage": True}))[-1]
        assert not last.choices and last.usage.completion_tokens == 24
    with tally.check("stream helper"):
        asked: Any = {"model": tally.model, "messages": SKY, "stop": ["because"], "temperature": 0}
        with client.chat.completions.stream(**asked) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.message.content and (whole.choices[0].message.content or "").startswith(final.message.content)
    with tally.check("an agent's history"):
        assert greedy(tally, client, messages=AGENT).usage.prompt_tokens > 20
    with tally.check("an answer sent back"):
        more = [*SKY, whole.choices[0].message, {"role": "user", "content": "Go on."}]
        assert greedy(tally, client, messages=more).choices[0].message.content


def options(tally: Tally, client: openai.OpenAI) -> None:
    with tally.check("logprobs"):
        choice = greedy(tally, client, logprobs=True, top_logprobs=3).choices[0]
        tokens = choice.logprobs.content
        assert b"".join(bytes(token.bytes) for token in tokens).decode() == choice.message.content
        assert all(token.logprob == max(top.logprob for top in token.top_logprobs) for token in tokens)
    with tally.check("n"):
        several = [greedy(tally, client, n=3, temperature=1, seed=7).choices for _ in range(2)]
        texts = [[choice.message.content for choice in choices] for choices in several]
        assert [choice.index for choice in several[0]] == [0, 1, 2]
        assert texts[0] == texts[1] and len(set(texts[0])) == 3
    with tally.check("stop"):
        text = greedy(tally, client).choices[0].message.content
        word = text.split()[3]
        stopped = greedy(tally, client, stop=[word]).choices[0]
        assert stopped.finish_reason == "stop" and stopped.message.content == text[: text.index(word)]


def structured(tally: Tally, client: openai.OpenAI) -> None:
    asked: Any = {"model": tally.model, "messages": SKY, "max_tokens": 200, "temperature": 0}
    tools: Any = {"tools": [openai.pydantic_function_tool(Weather)], "parallel_tool_calls": False}
    named = {**tools, "tool_choice": {"type": "function", "function": {"name": "Weather"}}}
    tools["tool_choice"] = "required"
    with tally.check("chat, parse"):
        parsed = client.chat.completions.parse(**asked, response_format=Weather).choices[0].message.parsed
        assert isinstance(parsed, Weather)
    with tally.check("chat, parse, tools required"):
        choice = client.chat.completions.parse(**asked, **tools).choices[0]
        (call,) = choice.message.tool_calls or []
        assert call.function.name == "Weather" and isinstance(call.function.parsed_arguments, Weather)
        assert choice.finish_reason == "tool_calls"
    with tally.check("stream helper, tools required"):
        with client.chat.completions.stream(**asked, **tools) as stream:
            done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
            final = stream.get_final_completion().choices[0].message.tool_calls or []
        assert [event.arguments for event in done] == [call.function.arguments for call in final]
        assert final[0].function.arguments == call.function.arguments and final[0].id.startswith("call_")
    with (
        tally.check("stream helper, response_format"),
        client.chat.completions.stream(**asked, response_format=Weather) as stream,
    ):
        assert stream.get_final_completion().choices[0].message.parsed == parsed
    with tally.check("a tool by name"):
        (call,) = client.chat.completions.parse(**asked, **named).choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Weather)


def completions(tally: Tally, client: openai.OpenAI) -> None:
    asked: Any = {"model": tally.model, "max_tokens": 12, "temperature": 0}
    with tally.check("completions"):
        whole = client.completions.create(prompt=FRANCE, **asked)
        assert "Paris" in whole.choices[0].text
    with tally.check("completions, stream"):
        chunks = client.completions.create(prompt=FRANCE, stream=True, **asked)
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    with tally.check("several prompts"):
        both = client.completions.create(prompt=[FRANCE, "One, two,"], **asked).choices
        assert [choice.index for choice in both] == [0, 1] and both[0].text == whole.choices[0].text
    with tally.check("completions, logprobs and echo"):
        found = client.completions.create(prompt=FRANCE, logprobs=2, **asked).choices[0]
        assert found.logprobs and "".join(found.logprobs.tokens or []) == whole.choices[0].text
        assert client.completions.create(prompt=FRANCE, echo=True, **asked).choices[0].text == FRANCE + found.text


def responses(tally: Tally, client: openai.OpenAI) -> None:
    asked: Any = {"model": tally.model, "input": SKY, "temperature": 0}
    with tally.check("responses"):
        whole = client.responses.create(**asked, max_output_tokens=24, instructions="Be brief.", store=False)
        assert whole.output_text and whole.status == "incomplete" and whole.usage and whole.usage.output_tokens == 24
        assert whole.incomplete_details and whole.incomplete_details.reason == "max_output_tokens"
    with tally.check("responses, stream"):
        with client.responses.stream(**asked, max_output_tokens=24, instructions="Be brief.") as stream:
            events = list(stream)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == whole.output_text and events[-1].type == "response.incomplete"
    with tally.check("responses, parse"):
        found = client.responses.parse(**asked, max_output_tokens=200, text_format=Weather)
        assert isinstance(found.output_parsed, Weather) and found.status == "completed"
    with tally.check("responses, tools required"):
        tool: Any = openai.pydantic_function_tool(Weather)
        one: Any = {"tool_choice": "required", "parallel_tool_calls": False}
        (called,) = client.responses.parse(**asked, max_output_tokens=200, tools=[tool], **one).output
        assert called.type == "function_call" and isinstance(called.parsed_arguments, Weather)
    with tally.check("responses, errors by type"):
        refused(openai.NotFoundError, "model", lambda: client.responses.create(model="other", input="x"))
        for name in ("previous_response_id", "conversation"):
            more: Any = {**asked, name: "x_1"}
            refused(openai.BadRequestError, name, lambda more=more: client.responses.create(**more))
        refused(openai.BadRequestError, "background", lambda: client.responses.create(**asked, background=True))


def loops(tally: Tally, client: openai.OpenAI) -> None:
    """Without a memory: all that was said goes back with the next request."""
    call = 'say:<tool_call>{"name": "shell", "arguments": {}}</tool_call>'
    with tally.check("responses, a loop with a tool"):
        items: Any = [{"role": "user", "content": call}]
        asked: Any = client.responses.create(model=tally.scripted_model, input=items, tools=[SHELL]).output
        assert [item.type for item in asked] == ["function_call"]
        items += asked
        items += [{"type": "function_call_output", "call_id": asked[0].call_id, "output": "21 degrees"}]
        answer = client.responses.create(model=tally.scripted_model, input=items, tools=[SHELL])
        assert answer.output_text == "The tool said: 21 degrees"
    with tally.check("chat, a loop with a tool, streamed"):
        messages: Any = [{"role": "user", "content": call}]
        tool: Any = {"type": "function", "function": {"name": "shell", "parameters": SHELL["parameters"]}}
        with client.chat.completions.stream(model=tally.scripted_model, messages=messages, tools=[tool]) as stream:
            said: Any = stream.get_final_completion().choices[0].message
        messages += [said, {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "21 degrees"}]
        last = client.chat.completions.create(model=tally.scripted_model, messages=messages, tools=[tool])
        assert last.choices[0].message.content == "The tool said: 21 degrees"
    with tally.check("chat, two calls in one answer"):
        twice: Any = [{"role": "user", "content": call + call.removeprefix("say:")}]
        whole = client.chat.completions.create(model=tally.scripted_model, messages=twice, tools=[tool])
        calls: Any = whole.choices[0].message.tool_calls
        assert [called.function.name for called in calls] == ["shell", "shell"]
        assert len({called.id for called in calls}) == 2


def around(tally: Tally, client: openai.OpenAI) -> None:
    with tally.check("models"):
        assert tally.model in [model.id for model in client.models.list()]
        assert client.models.retrieve(tally.model).id == tally.model
    with tally.check("headers of with_raw_response"):
        asked: Any = {"model": tally.model, "messages": SKY, "max_tokens": 2}
        sent = {"X-Request-Id": "mine-17"}
        raw = client.chat.completions.with_raw_response.create(**asked, extra_headers=sent, extra_body={"novel": 1})
        assert raw.headers["x-request-id"] == "mine-17" and raw.headers["x-baton-ignored-fields"] == "novel"
        assert raw.parse()._request_id == "mine-17"
    with tally.check("errors by type"):
        refused(openai.NotFoundError, "model", lambda: greedy(tally, client, model="other"))
        refused(openai.BadRequestError, "max_tokens", lambda: greedy(tally, client, max_tokens=-2))
        refused(openai.BadRequestError, "temperature", lambda: greedy(tally, client, temperature=3, stream=True))
        refused(openai.NotFoundError, None, lambda: client.embeddings.create(model=tally.model, input="x"))
    with tally.check("a stream hung up"):
        with greedy(tally, client, stream=True, max_tokens=900) as stream:
            next(iter(stream))
        assert greedy(tally, client).choices[0].finish_reason == "length"


def refused(kind: type[openai.APIStatusError], param: str | None, ask: Any) -> None:
    try:
        ask()
    except kind as error:
        assert error.param == param, f"param is {error.param!r}: {error}"
        assert error.type == "invalid_request_error" and error.code, f"no type or code: {error}"
        return
    raise AssertionError(f"no {kind.__name__}")


async def ask_async(tally: Tally) -> str:
    asked: Any = {"model": tally.model, "messages": SKY, "max_tokens": 24, "temperature": 0, "stream": True}
    async with openai.AsyncOpenAI(base_url=tally.api, api_key="none", max_retries=0) as client:
        chunks = await client.chat.completions.create(**asked)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


if __name__ == "__main__":
    main(from_arguments())
