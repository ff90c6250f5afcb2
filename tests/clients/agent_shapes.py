"""The requests of Codex and of Claude Code, by hand in the forms that they document: no agent is installed here.

Both stream, send what they were answered back as history, and run their tools themselves.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tally import Tally, from_arguments

CODEX_HEADERS = {
    "Authorization": "Bearer none",
    "Accept": "text/event-stream",
    "User-Agent": "codex_cli_rs/0.99.0 (Linux; x86_64)",
    "originator": "codex_cli_rs",
    "session_id": "0199a1b2-0000-7000-8000-000000000001",
    "conversation_id": "0199a1b2-0000-7000-8000-000000000001",
    "version": "0.99.0",
}
COMMAND = {"type": "array", "items": {"type": "string"}}
CODEX_TOOLS = [
    {
        "type": "function",
        "name": "shell",
        "description": "Runs a command and returns its output.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {"command": COMMAND, "workdir": {"type": "string"}, "timeout_ms": {"type": "number"}},
            "required": ["command"],
            "additionalProperties": False,
        },
    },
    {"type": "local_shell"},
    {"type": "web_search", "external_web_access": False},
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
    },
]
CODEX_CALL = 'say:<tool_call>{"name": "shell", "arguments": {"command": ["ls"]}}</tool_call>'
BETAS = (
    "claude-code-20250219",
    "interleaved-thinking-2025-05-14",
    "context-management-2025-06-27",
    "effort-2025-11-24",
)
CLAUDE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": ",".join(BETAS),
    "User-Agent": "claude-cli/2.0.0 (external, cli)",
    "x-app": "cli",
    "x-stainless-lang": "js",
    "x-stainless-retry-count": "0",
    "x-stainless-timeout": "600",
    "anthropic-dangerous-direct-browser-access": "true",
}
CLAUDE_KEYS = ({"x-api-key": "none"}, {"Authorization": "Bearer none"})
CACHED = {"cache_control": {"type": "ephemeral"}}
CLAUDE_CALL = 'say:<tool_call>{"name": "Bash", "arguments": {"command": "ls", "description": "lists"}}</tool_call>'
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
        """Return what the events hold. Each is named by its own type, and nothing else is in the stream."""
        assert self.status == 200 and self.headers["content-type"].startswith("text/event-stream"), self.body[:300]
        return list(events_of(self.body.decode()))


def main(tally: Tally) -> None:
    codex(tally)
    for key in CLAUDE_KEYS:
        claude_code(tally, f"Claude Code, {next(iter(key))}", {**CLAUDE_HEADERS, **key})
    around(tally)


def ask(url: str, headers: Mapping[str, str], body: Any = None, method: str | None = None) -> Answer:
    data = None if body is None else json.dumps(body).encode()
    sent = {**headers, "Content-Type": "application/json"} if data is not None else dict(headers)
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, sent, method=method)) as answer:
            return Answer(answer.status, {name.lower(): value for name, value in answer.headers.items()}, answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, {name.lower(): value for name, value in error.headers.items()}, error.read())


def events_of(text: str) -> Iterator[dict[str, Any]]:
    for part in text.split("\n\n"):
        lines = [line for line in part.splitlines() if not line.startswith(":")]
        if not lines:
            continue
        named, data = lines
        event = json.loads(data.removeprefix("data: "))
        assert named == f"event: {event['type']}", part
        yield event


# ---- Codex


def codex(tally: Tally) -> None:
    with tally.check("Codex: a turn"):
        events = codex_turn(tally, [said_by("user", "say:hello there")])
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.completed"
        assert text_of(events) == "hello there" and events[-1]["response"]["usage"]["total_tokens"] > 0
    with tally.check("Codex: a call and its result"):
        (call,) = items_of(codex_turn(tally, [said_by("user", CODEX_CALL)]))
        assert call["type"] == "function_call" and json.loads(call["arguments"]) == {"command": ["ls"]}
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "a.txt"}
        thought = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAA=="}
        known = {name: call[name] for name in ("type", "name", "arguments", "call_id")}
        events = codex_turn(tally, [said_by("user", CODEX_CALL), thought, known, result])
        assert text_of(events) == "The tool said: a.txt"
    with tally.check("Codex: fields and tools without effect are named"):
        answer = ask(f"{tally.scripted_api}/responses", CODEX_HEADERS, codex_body(tally, [said_by("user", "say:x")]))
        named = answer.headers["x-baton-ignored-fields"].split(",")
        assert {"tools[1]", "tools[2]", "tools[3]", "prompt_cache_key"} <= set(named) and "tools[0]" not in named
    with tally.check("Codex: models, an unknown model, compaction"):
        assert ask(f"{tally.scripted_api}/models?client_version=0.99.0", CODEX_HEADERS).json["data"]
        missing = ask(f"{tally.scripted_api}/responses", CODEX_HEADERS, codex_body(tally, []) | {"model": "gpt-5"})
        assert missing.status in (400, 404) and missing.json["error"]["type"] == "invalid_request_error"
        compact = ask(f"{tally.scripted_api}/responses/compact", CODEX_HEADERS, codex_body(tally, []))
        assert compact.status == 404 and compact.json["error"]["code"]


def codex_turn(tally: Tally, items: list[Any]) -> list[dict[str, Any]]:
    return ask(f"{tally.scripted_api}/responses", CODEX_HEADERS, codex_body(tally, items)).events()


def codex_body(tally: Tally, items: list[Any]) -> dict[str, Any]:
    context = said_by("user", "<environment_context>\n  <cwd>/work</cwd>\n</environment_context>")
    return {
        "model": tally.scripted_model,
        "instructions": "You are a coding agent running in a terminal.",
        "input": [said_by("developer", "Sandbox: read-only."), context, *items],
        "tools": CODEX_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": CODEX_HEADERS["conversation_id"],
        "text": {"verbosity": "medium"},
    }


def said_by(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


def items_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]


# ---- Claude Code


def claude_code(tally: Tally, name: str, headers: Mapping[str, str]) -> None:
    url = f"{tally.scripted_url}/v1/messages?beta=true"
    with tally.check(f"{name}: a turn"):
        events = ask(url, headers, claude_body(tally, [reminded("say:hello there")])).events()
        assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
        assert blocks_of(events) == ["hello there"] and events[-2]["delta"]["stop_reason"] == "end_turn"
    with tally.check(f"{name}: a call and its result"):
        events = ask(url, headers, claude_body(tally, [reminded(CLAUDE_CALL)])).events()
        begun = next(event["content_block"] for event in events if event["type"] == "content_block_start")
        assert (begun["type"], begun["name"]) == ("tool_use", "Bash") and begun["id"].startswith("toolu_")
        call = begun | {"input": json.loads(blocks_of(events)[0])}
        assert call["input"]["command"] == "ls" and events[-2]["delta"]["stop_reason"] == "tool_use"
        thought = {"type": "thinking", "thinking": "I look.", "signature": "c2ln"}
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "a.txt", "is_error": False, **CACHED}
        history = [
            reminded(CLAUDE_CALL),
            {"role": "assistant", "content": [thought, call]},
            {"role": "user", "content": [result]},
        ]
        events = ask(url, headers, claude_body(tally, history)).events()
        assert blocks_of(events) == ["The tool said: a.txt"]
    with tally.check(f"{name}: other ways to think"):
        for thinking in ({"type": "enabled", "budget_tokens": 31999}, {"type": "disabled"}):
            body = claude_body(tally, [reminded("say:yes")]) | {"thinking": thinking}
            assert blocks_of(ask(url, headers, body).events()) == ["yes"]
    with tally.check(f"{name}: count_tokens"):
        body = claude_body(tally, [reminded("say:hello there")])
        asked = {part: body[part] for part in ("model", "messages", "system", "tools", "thinking")}
        counted = ask(f"{tally.scripted_url}/v1/messages/count_tokens?beta=true", headers, asked).json
        usage = ask(url, headers, body | {"stream": False}).json["usage"]
        assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    with tally.check(f"{name}: the small requests around a session"):
        assert ask(tally.scripted_url, headers, method="HEAD").status == 200
        quota = {"model": tally.model, "max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]}
        assert ask(f"{tally.url}/v1/messages?beta=true", headers, quota).json["stop_reason"] == "max_tokens"
        titled = claude_body(tally, [{"role": "user", "content": "Mend the tests"}]) | {
            "model": tally.model,
            "tools": [],
            "thinking": {"type": "disabled"},
            "temperature": 1,
            "output_config": {"format": {"type": "json_schema", "schema": TITLE}},
        }
        (title,) = blocks_of(ask(f"{tally.url}/v1/messages?beta=true", headers, titled).events())
        assert json.loads(title).keys() == {"is_new", "kind"}


def claude_body(tally: Tally, messages: list[Any]) -> dict[str, Any]:
    return {
        "model": tally.scripted_model,
        "messages": messages,
        "system": [
            {"type": "text", "text": "You are a coding agent.", **CACHED},
            {"type": "text", "text": "\nWork in /work.\n", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ],
        "tools": [
            claude_tool("Bash", "command", "description"),
            claude_tool("Read", "file_path"),
            claude_tool("Grep", "pattern", "path") | CACHED,
        ],
        "metadata": {"user_id": '{"device_id":"0","account_uuid":"","session_id":"0199a1b2"}'},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }


def claude_tool(name: str, *texts: str) -> dict[str, Any]:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {text: {"type": "string", "description": f"the {text}"} for text in texts},
        "required": [texts[0]],
        "additionalProperties": False,
    }
    return {"name": name, "description": f"{name}, as its name says.", "input_schema": schema}


def reminded(text: str) -> dict[str, Any]:
    note = "<system-reminder>\nThere is no CLAUDE.md.\n</system-reminder>\n"
    return {"role": "user", "content": [{"type": "text", "text": note}, {"type": "text", "text": text, **CACHED}]}


def blocks_of(events: list[dict[str, Any]]) -> list[str]:
    """Return the text of each block, or the JSON text of its input."""
    texts: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            texts[event["index"]] = texts.get(event["index"], "") + (delta.get("text") or delta.get("partial_json", ""))
    return list(texts.values())


# ---- what is not there


def around(tally: Tally) -> None:
    with tally.check("Claude Code: unknown paths and models"):
        headers = {**CLAUDE_HEADERS, **CLAUDE_KEYS[0]}
        for path in ("/v1/messages/batches", "/v1/messages/batches/x/results"):
            missing = ask(tally.scripted_url + path, headers)
            assert missing.status == 404 and missing.json["error"]["type"] == "not_found_error", path
            assert missing.json["type"] == "error" and missing.json["request_id"] == missing.headers["request-id"]
        other = claude_body(tally, [reminded("say:x")]) | {"model": "claude-opus"}
        refused = ask(f"{tally.scripted_url}/v1/messages?beta=true", headers, other)
        assert refused.status == 404 and refused.json["error"]["type"] == "not_found_error"
        for path in ("/api/event_logging/batch", "/v1/nothing"):
            missing = ask(tally.scripted_url + path, headers, {"events": []})
            assert missing.status == 404 and missing.json["error"]["type"] == "invalid_request_error", path


if __name__ == "__main__":
    main(from_arguments())
