"""The openai SDK for Python: what its users do, on /v1/chat/completions, /v1/completions and /v1/models."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
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


def main(tally: Tally) -> None:
    with client_of(tally) as client:
        chat(tally, client)
        options(tally, client)
        completions(tally, client)
        around(tally, client)
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
        refused(openai.BadRequestError, "max_tokens", lambda: greedy(tally, client, max_tokens=-1))
        refused(openai.BadRequestError, "temperature", lambda: greedy(tally, client, temperature=3, stream=True))
        refused(openai.NotFoundError, None, lambda: client.embeddings.create(model=tally.model, input="x"))
        refused(openai.NotFoundError, None, lambda: client.responses.create(model=tally.model, input="x"))
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
