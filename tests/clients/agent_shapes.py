"""Requests around the sessions of Codex and Claude Code, with the bodies that were recorded: what a session of one
prompt does not send. Small requests are by hand, in the forms that both document.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.clients.record import FOLDER, bodies_of
from tests.clients.tally import Tally, from_arguments

KEY = {"x-api-key": "none"}
THINKING = ({"type": "enabled", "budget_tokens": 31999}, {"type": "disabled"}, {"type": "adaptive"})
TITLE = {
    "type": "object",
    "properties": {"is_new": {"type": "boolean"}, "kind": {"enum": ["fix", "feature"]}},
    "required": ["is_new", "kind"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[dict[str, Any]]:
        """Return what the events hold."""
        assert self.status == 200 and self.headers["content-type"].startswith("text/event-stream"), self.body[:300]
        lines = self.body.decode().splitlines()
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


@dataclass(frozen=True, slots=True)
class Recorded:
    """The first request of a session: where it goes, its headers, its body for the served model."""

    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]


def recorded(tally: Tally, name: str) -> Recorded:
    fixture = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    first = fixture["requests"][0]
    headers = dict(line.split(": ", 1) for line in first["headers"])
    kept = {name: text for name, text in headers.items() if name.lower() not in ("host", "content-length")}
    kept["Accept-Encoding"] = "identity"
    return Recorded(first["path"], kept, bodies_of(fixture)[0] | {"model": tally.scripted_model})


def main(tally: Tally) -> None:
    codex(tally)
    for name in ("claude-code", "claude-code-older-model"):
        claude_code(tally, name, recorded(tally, name))
    small_requests(tally)
    around(tally, recorded(tally, "claude-code"))


def ask(url: str, headers: Mapping[str, str], body: Any = None, method: str | None = None) -> Answer:
    data = None if body is None else json.dumps(body).encode()
    sent = {**headers, "Content-Type": "application/json"} if data is not None else dict(headers)
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, sent, method=method)) as answer:
            return Answer(answer.status, {name.lower(): value for name, value in answer.headers.items()}, answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, {name.lower(): value for name, value in error.headers.items()}, error.read())


def codex(tally: Tally) -> None:
    session = recorded(tally, "codex")
    with tally.check("Codex: events are numbered"):
        events = ask(tally.scripted_url + session.path, session.headers, session.body).events()
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.completed"
        assert events[-1]["response"]["usage"]["total_tokens"] > 10_000
    with tally.check("Codex: fields and tools without effect are named"):
        answer = ask(tally.scripted_url + session.path, session.headers, session.body)
        named = set(answer.headers["x-baton-ignored-fields"].split(","))
        other = {f"tools[{i}]" for i, tool in enumerate(session.body["tools"]) if tool["type"] != "function"}
        assert {name for name in named if name.startswith("tools")} == other and "store" in named
    with tally.check("Codex: models, an unknown model, compaction"):
        assert ask(f"{tally.scripted_api}/models?client_version=0.99.0", session.headers).json["data"]
        missing = ask(tally.scripted_url + session.path, session.headers, {**session.body, "model": "gpt-5"})
        assert missing.status in (400, 404) and missing.json["error"]["type"] == "invalid_request_error"
        compact = ask(f"{tally.scripted_api}/responses/compact", session.headers, session.body)
        assert compact.status == 404 and compact.json["error"]["code"]


def claude_code(tally: Tally, name: str, session: Recorded) -> None:
    url = tally.scripted_url + session.path
    short = {**session.body, "messages": [{"role": "user", "content": "say:yes"}]}
    with tally.check(f"{name}: ways to think"):
        for thinking in THINKING:
            events = ask(url, session.headers, {**short, "thinking": thinking}).events()
            assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
            assert blocks_of(events) == ["yes"] and events[-2]["delta"]["stop_reason"] == "end_turn"
    with tally.check(f"{name}: count_tokens"):
        asked = {part: session.body[part] for part in ("model", "messages", "system", "tools", "thinking")}
        counted = ask(url.replace("/messages", "/messages/count_tokens"), session.headers, asked).json
        usage = ask(url, session.headers, {**session.body, "stream": False}).json["usage"]
        assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def small_requests(tally: Tally) -> None:
    with tally.check("Claude Code: the small requests around a session"):
        assert ask(tally.scripted_url, KEY, method="HEAD").status == 200
        quota = {"model": tally.model, "max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]}
        assert ask(f"{tally.url}/v1/messages?beta=true", KEY, quota).json["stop_reason"] == "max_tokens"
        titled = {
            "model": tally.model,
            "max_tokens": 500,
            "messages": [{"role": "user", "content": "Mend the tests"}],
            "thinking": {"type": "disabled"},
            "temperature": 1,
            "output_config": {"format": {"type": "json_schema", "schema": TITLE}},
            "stream": True,
        }
        (title,) = blocks_of(ask(f"{tally.url}/v1/messages?beta=true", KEY, titled).events())
        assert json.loads(title).keys() == {"is_new", "kind"}


def blocks_of(events: list[dict[str, Any]]) -> list[str]:
    """Return the text of each block, or the JSON text of its input."""
    texts: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            texts[event["index"]] = texts.get(event["index"], "") + (delta.get("text") or delta.get("partial_json", ""))
    return list(texts.values())


def around(tally: Tally, session: Recorded) -> None:
    with tally.check("Claude Code: unknown paths and models"):
        for path in ("/v1/messages/batches", "/v1/messages/batches/x/results"):
            missing = ask(tally.scripted_url + path, session.headers)
            assert missing.status == 404 and missing.json["error"]["type"] == "not_found_error", path
            assert missing.json["type"] == "error" and missing.json["request_id"] == missing.headers["request-id"]
        refused = ask(tally.scripted_url + session.path, session.headers, {**session.body, "model": "claude-opus"})
        assert refused.status == 404 and refused.json["error"]["type"] == "not_found_error"
        missing = ask(tally.scripted_url + "/v1/nothing", session.headers, {"events": []})
        assert missing.status == 404 and missing.json["error"]["type"] == "invalid_request_error"
        missing = ask(tally.scripted_url + "/api/event_logging/batch", session.headers, {"events": []})
        assert missing.status == 404 and "/api/event_logging/batch" in missing.json["error"], "in Ollama's form"


if __name__ == "__main__":
    main(from_arguments())
