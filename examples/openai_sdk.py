"""Chat with a running Baton through the openai package: python examples/openai_sdk.py [URL]

Needs `pip install openai` and a running server (`make run`).
"""

from __future__ import annotations

import json
import sys

import openai

COLOR = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green", "blue"]}},
    "required": ["color"],
    "additionalProperties": False,  # as OpenAI requires it for strict schemas
}


def main(url: str) -> None:
    # Any key works, unless the router was started with --api-key-file.
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id

    # 1. A whole answer. The same seed gives the same answer, on any node.
    question = [{"role": "user", "content": "What is the capital of Japan?"}]
    answer = client.chat.completions.create(model=model, messages=question, max_tokens=40, seed=7)
    print("answer:", answer.choices[0].message.content)

    # 2. The same answer as a stream.
    stream = client.chat.completions.create(model=model, messages=question, max_tokens=40, seed=7, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    print("stream:", "".join(pieces))

    # 3. An answer that follows a JSON schema. A grammar enforces the schema, so the answer parses unless it is cut off.
    wanted = {"type": "json_schema", "json_schema": {"name": "color", "schema": COLOR}}
    picked = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Pick a color."}], max_tokens=300, response_format=wanted
    )
    print("json:", json.loads(picked.choices[0].message.content)["color"])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
