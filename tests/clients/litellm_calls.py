"""LiteLLM as a library, with the prefixes for servers like this one: hosted_vllm/ and openai/."""

from __future__ import annotations

import asyncio
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or importing it asks the network for a list of prices

import litellm
from tally import Tally, from_arguments

SKY: Any = [{"role": "user", "content": "Why is the sky blue?"}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
AGENT: Any = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
    {"role": "user", "content": "How warm is it in Paris?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "21 degrees"},
]


def main(tally: Tally) -> None:
    wanted = tally.post("/v1/chat/completions", {"messages": SKY, "max_tokens": 24, "temperature": 0})
    text = wanted["choices"][0]["message"]["content"]
    for prefix in ("hosted_vllm", "openai"):
        chat(tally, prefix, text)
    with tally.check("text_completion"):
        asked: Any = {"api_base": tally.api, "api_key": "none", "max_tokens": 12, "temperature": 0}
        prompt = "The capital of France is"
        found = litellm.text_completion(model=f"text-completion-openai/{tally.model}", prompt=prompt, **asked)
        assert "Paris" in found.choices[0].text


def chat(tally: Tally, prefix: str, text: str) -> None:
    asked: Any = {"model": f"{prefix}/{tally.model}", "api_base": tally.api, "api_key": "none"}
    asked |= {"messages": SKY, "max_tokens": 24, "temperature": 0, "num_retries": 0}
    with tally.check(f"{prefix}/: completion"):
        whole = litellm.completion(**asked)
        assert whole.choices[0].message.content == text and whole.choices[0].finish_reason == "length"
        assert whole.usage.completion_tokens == 24
    with tally.check(f"{prefix}/: stream with usage"):
        chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        assert chunks[-1].usage.completion_tokens == 24
    with tally.check(f"{prefix}/: acompletion"):
        assert asyncio.run(litellm.acompletion(**asked)).choices[0].message.content == text
    with tally.check(f"{prefix}/: options"):
        more = {"n": 2, "seed": 7, "stop": ["!"], "logprobs": True, "top_logprobs": 2, "user": "somebody"}
        choices = litellm.completion(**{**asked, "temperature": 1, **more}).choices
        assert [choice.index for choice in choices] == [0, 1] and choices[0].logprobs.content
    with tally.check(f"{prefix}/: an agent's history"):
        assert litellm.completion(**{**asked, "messages": AGENT}).usage.prompt_tokens > 20
    with tally.check(f"{prefix}/: an answer sent back"):
        more_messages = [*SKY, whole.choices[0].message, {"role": "user", "content": "Go on."}]
        assert litellm.completion(**{**asked, "messages": more_messages}).choices[0].message.content
    with tally.check(f"{prefix}/: errors by type"):
        refused(litellm.NotFoundError, {**asked, "model": f"{prefix}/other"})
        refused(litellm.BadRequestError, {**asked, "max_tokens": -2})
        refused(litellm.BadRequestError, {**asked, "max_tokens": -2, "stream": True})


def refused(kind: type[Exception], asked: dict[str, Any]) -> None:
    try:
        litellm.completion(**asked)
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


if __name__ == "__main__":
    main(from_arguments())
