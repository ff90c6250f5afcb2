"""How well the shipped model uses tools: are required calls valid, and does it choose rightly by itself?

python -m benchmarks.tool_choice [--model smollm2]
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema

from benchmarks.cluster import baton_up

WEATHER, SUM, TIMER = "get_weather", "add_numbers", "set_timer"
PARAMETERS: dict[str, dict[str, Any]] = {
    WEATHER: {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
    SUM: {"a": {"type": "number"}, "b": {"type": "number"}},
    TIMER: {"minutes": {"type": "integer", "minimum": 1}},
}
ABOUT = {
    WEATHER: "Get the weather of a city now.",
    SUM: "Add two numbers.",
    TIMER: "Set a timer that rings after some minutes.",
}
# what is asked, and the function that helps ("" for none)
ASKED = (
    ("What is the weather in Paris?", WEATHER), ("Is it raining in London now?", WEATHER),
    ("How warm is it in Cairo today?", WEATHER), ("Tell me the weather in Oslo, in celsius.", WEATHER),
    ("Do I need an umbrella in Tokyo?", WEATHER), ("What is 12 plus 30?", SUM), ("Add 4.5 and 8.", SUM),
    ("Please add 100 and 250 for me.", SUM), ("What is the sum of 7 and 9?", SUM), ("Compute 31 + 11.", SUM),
    ("Set a timer for 10 minutes.", TIMER), ("Wake me in 20 minutes.", TIMER),
    ("Start a timer of five minutes for the eggs.", TIMER), ("Remind me in 3 minutes.", TIMER),
    ("Please set a 45 minute timer.", TIMER), ("What is the capital of Italy?", ""), ("Write a short poem.", ""),
    ("Who was Albert Einstein?", ""), ("Say hello in French.", ""), ("What color is the sky?", ""),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="(default: %(default)s)")
    args = parser.parse_args()
    with baton_up("--model", args.model) as port, ThreadPoolExecutor(8) as pool:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        required, chosen = (
            list(pool.map(lambda asked, choice=choice: called(url, args.model, asked[0], choice), ASKED))
            for choice in ("required", "auto")
        )
    print(f"required: {sum(map(is_valid, required))} of {len(ASKED)} calls are valid by their schema")
    rights = [name == wanted for (name, _), (_, wanted) in zip(chosen, ASKED, strict=True)]
    called_rightly = [right for right, (_, wanted) in zip(rights, ASKED, strict=True) if wanted]
    print(f"auto: {sum(rights)} of {len(ASKED)} choices are right; where a function helps, {sum(called_rightly)} of "
          f"{len(called_rightly)}")  # fmt: skip
    return 0 if all(map(is_valid, required)) else 1


def called(url: str, model: str, question: str, choice: str) -> tuple[str, str]:
    """Name and arguments of the answer's first call; two empty texts for none."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": ABOUT[name],
                "parameters": schema_of(properties),
            },
        }
        for name, properties in PARAMETERS.items()
    ]
    body = {
        "model": model, "messages": [{"role": "user", "content": question}], "tools": tools, "tool_choice": choice,
        "temperature": 0.0, "max_tokens": 120,
    }  # fmt: skip
    message = httpx.post(url, json=body, timeout=300).raise_for_status().json()["choices"][0]["message"]
    for call in message.get("tool_calls") or ():
        return call["function"]["name"], call["function"]["arguments"]
    return "", ""


def schema_of(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def is_valid(call: tuple[str, str]) -> bool:
    name, arguments = call
    if name not in PARAMETERS:
        return False
    try:
        jsonschema.validate(json.loads(arguments), schema_of(PARAMETERS[name]))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
