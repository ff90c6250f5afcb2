"""What Open WebUI sends to an Ollama: its calls as its source has them, by hand. Standard library only."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from datetime import datetime
from typing import Any

from tests.clients.tally import Tally, from_arguments

Json = dict[str, Any]
# a user's chat after Open WebUI has translated it
CHAT: Json = {
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}],
    "options": {"temperature": 0, "num_predict": 24, "num_ctx": 2048, "seed": 42, "stop": ["###"], "mirostat": 0},
    "keep_alive": "5m",
    "think": False,
}
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = 'say:<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


def main(tally: Tally) -> None:
    with tally.check("the connection is verified, and the version is compared"):
        version = asked(tally.url, "/api/version")["version"]
        assert all(part.isdigit() for part in version.split("."))
    with tally.check("models and loaded models are merged by name"):
        (model,) = asked(tally.url, "/api/tags")["models"]
        (loaded,) = asked(tally.url, "/api/ps")["models"]
        assert model["model"] == f"{tally.model}:latest" and loaded["name"] == model["name"]
        assert datetime.fromisoformat(loaded["expires_at"]).timestamp() > 0
    with tally.check("a model is shown"):
        assert asked(tally.url, "/api/show", {"model": model["model"]})["model_info"]
    with tally.check("a chat, streamed"):
        lines = streamed(tally.url, "/api/chat", {"model": model["model"], **CHAT, "stream": True})
        assert lines[-1]["done"] and lines[-1]["eval_count"] > 0 and lines[-1]["eval_duration"] > 0
        text = "".join(line["message"]["content"] for line in lines)
        assert text
    with tally.check("a title is asked for, whole"):
        whole = asked(tally.url, "/api/chat", {"model": model["model"], **CHAT, "stream": False})
        assert whole["message"]["content"] == text and whole["done"]
    with tally.check("a call and its result sent back"):
        own = f"{tally.scripted_model}:latest"
        turns: list[Json] = [{"role": "user", "content": CALL}]
        lines = streamed(tally.scripted_url, "/api/chat", {"model": own, "messages": turns, "tools": [TOOL]})
        (call,) = [call for line in lines for call in line["message"].get("tool_calls", [])]
        assert json.loads(json.dumps(call["function"]["arguments"])) == {"city": "Oslo"}
        turns.append({"role": "assistant", "content": "", "tool_calls": [{"index": 0, **call}]})
        turns.append({"role": "tool", "content": "21 degrees in Oslo", "tool_call_id": call["id"]})
        last = streamed(tally.scripted_url, "/api/chat", {"model": own, "messages": turns, "tools": [TOOL]})
        assert "".join(line["message"]["content"] for line in last) == "The tool said: 21 degrees in Oslo"
    with tally.check("a model is unloaded"):
        body = {"model": model["model"], "keep_alive": 0, "prompt": ""}
        assert asked(tally.url, "/api/generate", body)["done_reason"] == "unload"
    with tally.check("errors are texts"):
        for path, body in (("/api/chat", {"model": "other:latest", **CHAT}), ("/api/embed", {"input": ["x"]})):
            try:
                asked(tally.url, path, body)
            except urllib.error.HTTPError as error:
                assert isinstance(json.load(error)["error"], str)
            else:
                raise AssertionError(f"{path} was answered")


def opened(url: str, path: str, body: Json | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none"}
    return urllib.request.urlopen(urllib.request.Request(url + path, data, headers))


def asked(url: str, path: str, body: Json | None = None) -> Json:
    """Its HTTP library parses no answer of another media type."""
    with opened(url, path, body) as answer:
        assert answer.headers["content-type"] == "application/json"
        found: Json = json.load(answer)
        return found


def streamed(url: str, path: str, body: Json) -> list[Json]:
    with opened(url, path, body) as answer:
        assert answer.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in answer]


if __name__ == "__main__":
    main(from_arguments())
