"""The anthropic SDK for Python: what its users do, on /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import anthropic
import pydantic
from tally import Tally, from_arguments

SKY: Any = [{"role": "user", "content": "Why is the sky blue?"}]
GREEDY: Any = {"temperature": 0}  # the SDK itself no longer has this field
CALL = 'say:<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


class Weather(pydantic.BaseModel):
    """Bounded, so that any model comes to its end."""

    model_config = pydantic.ConfigDict(extra="forbid")
    sky: Literal["clear", "cloudy", "rain"]
    is_warm: bool


SCHEMA: Any = Weather.model_json_schema()
TOOL: Any = {"name": "report", "description": "reports the weather", "input_schema": SCHEMA}
ONE_CALL: Any = {"type": "any", "disable_parallel_tool_use": True}


def main(tally: Tally) -> None:
    with client_of(tally) as client:
        messages(tally, client)
        structured(tally, client)
        around(tally, client)
    with tally.check("async client, stream"):
        assert asyncio.run(ask_async(tally)) == text_of(greedy(tally, client_of(tally)))
    with anthropic.Anthropic(base_url=tally.scripted_url, api_key="none", max_retries=0) as client:
        loops(tally, client)


def client_of(tally: Tally) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=tally.url, api_key="none", max_retries=0)


def greedy(tally: Tally, client: anthropic.Anthropic, **more: Any) -> Any:
    fields = {"model": tally.model, "messages": SKY, "max_tokens": 24, "extra_body": GREEDY, **more}
    return client.messages.create(**fields)


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def messages(tally: Tally, client: anthropic.Anthropic) -> None:
    with tally.check("messages"):
        whole = greedy(tally, client)
        wanted = tally.post("/v1/chat/completions", {"messages": SKY, "max_tokens": 24, "temperature": 0})
        assert text_of(whole) == wanted["choices"][0]["message"]["content"]
        assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 24 and whole.role == "assistant"
    with tally.check("stream"):
        kinds = [event.type for event in greedy(tally, client, stream=True)]
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    with tally.check("stream helper"):
        asked: Any = {"model": tally.model, "messages": SKY, "max_tokens": 24, "extra_body": GREEDY}
        with client.messages.stream(**asked) as stream:
            pieces = list(stream.text_stream)
            final = stream.get_final_message()
        assert "".join(pieces) == text_of(final) == text_of(whole) and final.usage.output_tokens == 24
    with tally.check("stop_sequences"):
        word = text_of(whole).split()[3]
        stopped = greedy(tally, client, stop_sequences=[word])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
        assert text_of(stopped) == text_of(whole).partition(word)[0]
    with tally.check("an answer sent back"):
        more = [*SKY, {"role": "assistant", "content": whole.content}, {"role": "user", "content": "Go on."}]
        assert text_of(greedy(tally, client, messages=more, system="Be brief."))
    with tally.check("an answer begun"):
        begun = [*SKY, {"role": "assistant", "content": "The sky is"}]
        assert text_of(greedy(tally, client, messages=begun))


def structured(tally: Tally, client: anthropic.Anthropic) -> None:
    with tally.check("tools any"):
        called = greedy(tally, client, max_tokens=200, tools=[TOOL], tool_choice=ONE_CALL)
        block = called.content[-1]
        assert called.stop_reason == "tool_use" and block.type == "tool_use" and block.id.startswith("toolu_")
        Weather.model_validate(block.input)
    with tally.check("tools any, stream helper"):
        asked: Any = {"model": tally.model, "messages": SKY, "max_tokens": 200, "extra_body": GREEDY, "tools": [TOOL]}
        with client.messages.stream(**asked, tool_choice=ONE_CALL) as stream:
            parts = [event.partial_json for event in stream if event.type == "input_json"]
            final = stream.get_final_message().content[-1]
        assert final.type == "tool_use" and final.input == json.loads("".join(parts))
        Weather.model_validate(final.input)
    with tally.check("a tool by name"):
        one = {"type": "tool", "name": "report"}
        (block,) = greedy(tally, client, max_tokens=200, tools=[TOOL], tool_choice=one).content
        Weather.model_validate(block.input)
    with tally.check("output_config, json_schema"):
        config = {"format": {"type": "json_schema", "schema": SCHEMA}}
        Weather.model_validate_json(text_of(greedy(tally, client, max_tokens=200, output_config=config)))
    with tally.check("parse"):
        parsed = client.messages.parse(model=tally.model, max_tokens=200, messages=SKY, output_format=Weather)
        assert isinstance(parsed.parsed_output, Weather)


def around(tally: Tally, client: anthropic.Anthropic) -> None:
    with tally.check("count_tokens"):
        counted = client.messages.count_tokens(model=tally.model, messages=SKY, system="Be brief.").input_tokens
        usage = greedy(tally, client, system="Be brief.").usage
        assert counted == usage.input_tokens + usage.cache_read_input_tokens
    with tally.check("headers of with_raw_response"):
        sent = {"X-Request-Id": "mine-17"}
        raw = client.messages.with_raw_response.create(
            model=tally.model, messages=SKY, max_tokens=2, extra_headers=sent, extra_body={"novel": 1}
        )
        assert raw.headers["request-id"] == "mine-17" and raw.headers["x-baton-ignored-fields"] == "novel"
    with tally.check("errors by type"):
        refused(anthropic.NotFoundError, "not_found_error", lambda: greedy(tally, client, model="other"))
        refused(anthropic.BadRequestError, "invalid_request_error", lambda: greedy(tally, client, max_tokens=-2))
        wrong: Any = {"extra_body": {"temperature": 3}, "stream": True}
        refused(anthropic.BadRequestError, "invalid_request_error", lambda: greedy(tally, client, **wrong))
        refused(anthropic.NotFoundError, "not_found_error", lambda: client.messages.batches.list())
    with tally.check("a stream hung up"):
        with greedy(tally, client, stream=True, max_tokens=900) as stream:
            next(iter(stream))
        assert greedy(tally, client).stop_reason == "max_tokens"


def refused(kind: type[anthropic.APIStatusError], name: str, ask: Any) -> None:
    try:
        ask()
    except kind as error:
        body: Any = error.body
        assert body["type"] == "error" and body["error"]["type"] == name, body
        return
    raise AssertionError(f"no {kind.__name__}")


def loops(tally: Tally, client: anthropic.Anthropic) -> None:
    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Tells the weather.

        Args:
            city: where
        """
        return f"21 degrees in {city}"

    asked: Any = {"model": tally.scripted_model, "max_tokens": 200, "messages": [{"role": "user", "content": CALL}]}
    for name, streams in (("tool runner", False), ("tool runner, stream", True)):
        with tally.check(name):
            runner = client.beta.messages.tool_runner(**asked, tools=[weather], stream=streams)
            last: Any = runner.until_done()
            assert text_of(last) == "The tool said: 21 degrees in Oslo" and last.stop_reason == "end_turn"
    with tally.check("two calls in one answer"):
        twice = [{"role": "user", "content": CALL + CALL.removeprefix("say:")}]
        blocks = client.messages.create(**{**asked, "messages": twice}, tools=[weather.to_dict()]).content
        assert [block.type for block in blocks] == ["tool_use", "tool_use"] and blocks[0].id != blocks[1].id


async def ask_async(tally: Tally) -> str:
    asked: Any = {"model": tally.model, "messages": SKY, "max_tokens": 24, "extra_body": GREEDY}
    async with (
        anthropic.AsyncAnthropic(base_url=tally.url, api_key="none", max_retries=0) as client,
        client.messages.stream(**asked) as stream,
    ):
        return "".join([piece async for piece in stream.text_stream])


if __name__ == "__main__":
    main(from_arguments())
