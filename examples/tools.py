"""Let a model call a function of ours, and answer with the result: python examples/tools.py [URL]

Needs `pip install openai`, and a model that can call tools. The shipped one is too small to choose a tool by itself.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import openai

# The arguments of the model's calls follow this schema.
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather in a city.", "parameters": PARAMETERS},
}


def get_weather(city: str) -> str:
    return {"Oslo": "4 degrees and snow", "Rome": "21 degrees and sun"}[city]


def main(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]

    # 1. The model asks for a call. `required` forces it to call; with `auto`, the default, it may answer instead.
    asked = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,  # one call is enough
        max_tokens=300,  # enough for the whole call; a truncated call does not parse
        temperature=0,  # take the likeliest call
    )
    message = asked.choices[0].message
    call = message.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    print("call:", call.function.name, arguments)

    # 2. We run the function, and send the conversation back with the result.
    result = get_weather(**arguments)
    print("result:", result)
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]

    # 3. The model answers. With `none` it can't call a tool again.
    last = client.chat.completions.create(
        model=model, messages=messages, tools=[WEATHER], tool_choice="none", max_tokens=40, temperature=0
    )
    print("answer:", last.choices[0].message.content)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
