"""The ollama package for Python: chats, prompts, tools, schemas, models, errors."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import ollama
import pydantic
from tally import Tally, from_arguments

SKY: Any = [{"role": "user", "content": "Why is the sky blue?"}]
GREEDY: Any = {"temperature": 0, "num_predict": 24}
CALL = 'say:<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


class Weather(pydantic.BaseModel):
    """Bounded, so that any model comes to its end."""

    model_config = pydantic.ConfigDict(extra="forbid")
    sky: Literal["clear", "cloudy", "rain"]
    is_warm: bool


def weather(city: str) -> str:
    """Tells the weather.

    Args:
        city: where
    """
    return f"21 degrees in {city}"


def main(tally: Tally) -> None:
    client = ollama.Client(tally.url)
    texts(tally, client)
    models(tally, client)
    errors(tally, client)
    with tally.check("async client, stream"):
        assert asyncio.run(ask_async(tally)) == chat(tally, client).message.content
    loop(tally, ollama.Client(tally.scripted_url))


def chat(tally: Tally, client: ollama.Client, **more: Any) -> Any:
    fields = {"model": tally.model, "messages": SKY, "options": GREEDY, **more}
    return client.chat(**fields)


def texts(tally: Tally, client: ollama.Client) -> None:
    with tally.check("chat"):
        whole = chat(tally, client)
        wanted = tally.post("/v1/chat/completions", {"messages": SKY, "max_tokens": 24, "temperature": 0})
        assert whole.message.content == wanted["choices"][0]["message"]["content"]
        assert (whole.done, whole.done_reason, whole.eval_count) == (True, "length", 24)
        assert whole.prompt_eval_count == wanted["usage"]["prompt_tokens"]
        assert 0 < whole.eval_duration < whole.total_duration
    with tally.check("chat, stream"):
        parts = list(chat(tally, client, stream=True))
        assert "".join(part.message.content for part in parts) == whole.message.content and len(parts) > 10
        assert (parts[-1].done_reason, parts[-1].eval_count) == ("length", 24)
    with tally.check("generate, whole and streamed"):
        asked: Any = {"model": tally.model, "prompt": SKY[0]["content"], "options": GREEDY}
        one = client.generate(**asked)
        assert one.response == whole.message.content and one.prompt_eval_count == whole.prompt_eval_count
        assert "".join(part.response for part in client.generate(**asked, stream=True)) == one.response
    with tally.check("generate, raw"):
        raw = client.generate(tally.model, "The capital of France is", raw=True, options=GREEDY)
        wanted = tally.post(
            "/v1/completions", {"prompt": "The capital of France is", "max_tokens": 24, "temperature": 0}
        )
        assert raw.response == wanted["choices"][0]["text"]
    with tally.check("stop, seed, system"):
        word = whole.message.content.split()[3]
        stopped = chat(tally, client, options=GREEDY | {"stop": [word], "seed": 7})
        assert stopped.message.content == whole.message.content.partition(word)[0] and stopped.done_reason == "stop"
        assert client.generate(tally.model, "Hi", system="Be brief.", options=GREEDY).response
    with tally.check("format: a schema, and json"):
        options = GREEDY | {"num_predict": 200}
        said = chat(tally, client, format=Weather.model_json_schema(), options=options).message.content
        Weather.model_validate_json(said)
        assert chat(tally, client, format="json", options=GREEDY).message.content.startswith("{")
    with tally.check("logprobs"):
        scored = chat(tally, client, logprobs=True, top_logprobs=2).logprobs
        assert len(scored) == 24 and len(scored[0].top_logprobs) == 2
        assert "".join(one.token for one in scored) == whole.message.content
    with tally.check("load and unload"):
        assert client.generate(tally.model).done_reason == "load"
        assert client.generate(tally.model, keep_alive=0).done_reason == "unload"
        assert client.chat(tally.model, []).done_reason == "load"


def models(tally: Tally, client: ollama.Client) -> None:
    with tally.check("list, ps, show"):
        (listed,) = client.list().models
        assert listed.model == f"{tally.model}:latest" and listed.modified_at
        (running,) = client.ps().models
        assert running.model == listed.model and running.context_length == 1024
        shown = client.show(listed.model)
        assert shown.modelinfo["baton.context_length"] == 1024 and "tools" in shown.capabilities
    with tally.check("names with the tag latest"):
        assert chat(tally, client, model=f"{tally.model}:latest").model == f"{tally.model}:latest"


def errors(tally: Tally, client: ollama.Client) -> None:
    with tally.check("errors by status"):
        refused(404, "other", lambda: chat(tally, client, model="other"))
        refused(404, "other", lambda: list(chat(tally, client, model="other", stream=True)))
        refused(400, "options.temperature", lambda: chat(tally, client, options={"temperature": -1}))
        image = [{"role": "user", "content": "What is it?", "images": [b"\x89PNG"]}]
        refused(400, "reads text only", lambda: chat(tally, client, messages=image))
        refused(400, "embeddings", lambda: client.embed(tally.model, "x"))
        refused(400, "pulled", lambda: client.pull("other"))
        refused(400, "deleted", lambda: client.delete(tally.model))
    with tally.check("a stream hung up"):
        stream = chat(tally, client, stream=True, options={"num_predict": 900})
        next(iter(stream))
        stream.close()
        assert chat(tally, client).done_reason == "length"


def refused(status: int, word: str, ask: Any) -> None:
    try:
        ask()
    except ollama.ResponseError as error:
        assert error.status_code == status and word in error.error, (error.status_code, error.error)
        return
    raise AssertionError(f"no error {status}")


def loop(tally: Tally, client: ollama.Client) -> None:
    for name, streams in (("a loop with a tool", False), ("a loop with a tool, stream", True)):
        with tally.check(name):
            messages: list[Any] = [{"role": "user", "content": CALL}]
            asked = answered(client, tally.scripted_model, messages, streams)
            (call,) = asked["tool_calls"]
            result = weather(**call.function.arguments)
            messages += [asked, {"role": "tool", "tool_name": call.function.name, "content": result}]
            last = answered(client, tally.scripted_model, messages, streams)
            assert last["content"] == "The tool said: 21 degrees in Oslo" and not last["tool_calls"]


def answered(client: ollama.Client, model: str, messages: list[Any], streams: bool) -> dict[str, Any]:
    asked: Any = {"model": model, "messages": messages, "tools": [weather], "stream": streams}
    parts: list[Any] = list(client.chat(**asked)) if streams else [client.chat(**asked)]
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    return {"role": "assistant", "content": "".join(part.message.content for part in parts), "tool_calls": calls}


async def ask_async(tally: Tally) -> str:
    client = ollama.AsyncClient(tally.url)
    stream: Any = await client.chat(tally.model, SKY, options=GREEDY, stream=True)
    return "".join([part.message.content async for part in stream])


if __name__ == "__main__":
    main(from_arguments())
