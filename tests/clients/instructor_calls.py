"""instructor: pydantic objects from tools and from JSON schemas, whole, partial and in lists."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import instructor
import openai
import pydantic
from tally import Tally, from_arguments

SKY: Any = [{"role": "user", "content": "Why is the sky blue?"}]
MODES = {
    "TOOLS": instructor.Mode.TOOLS,
    "TOOLS_STRICT": instructor.Mode.TOOLS_STRICT,
    "JSON_SCHEMA": instructor.Mode.JSON_SCHEMA,
    "RESPONSES_TOOLS": instructor.Mode.RESPONSES_TOOLS,
}


class Weather(pydantic.BaseModel):
    """Bounded, so that any model comes to its end."""

    model_config = pydantic.ConfigDict(extra="forbid")
    sky: Literal["clear", "cloudy", "rain"]
    is_warm: bool


def main(tally: Tally) -> None:
    plain = openai.OpenAI(base_url=tally.api, api_key="none", max_retries=0)
    asked: Any = {"model": tally.model, "messages": SKY, "response_model": Weather, "temperature": 0, "max_retries": 0}
    for name, mode in MODES.items():
        client = instructor.from_openai(plain, mode=mode)
        limit: Any = {"max_output_tokens" if name.startswith("RESPONSES") else "max_tokens": 200}
        with tally.check(name):
            found = client.chat.completions.create(**asked, **limit)
            assert isinstance(found, Weather)
        if name in ("TOOLS", "JSON_SCHEMA"):
            with tally.check(f"{name}, with the completion"):
                found, raw = client.chat.completions.create_with_completion(**asked, **limit)
                assert isinstance(found, Weather) and raw.usage.completion_tokens > 0
            with tally.check(f"{name}, partial"):
                *_, last = client.chat.completions.create_partial(**asked, **limit)
                assert last.model_dump() == found.model_dump()
    with tally.check("async client"):
        assert isinstance(asyncio.run(ask_async(tally, asked)), Weather)


async def ask_async(tally: Tally, asked: Any) -> object:
    async with openai.AsyncOpenAI(base_url=tally.api, api_key="none", max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
        return await client.chat.completions.create(**asked, max_tokens=200)


if __name__ == "__main__":
    main(from_arguments())
