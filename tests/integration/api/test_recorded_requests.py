"""Recorded requests of agents, sent again as they came: a real router answers, and a node sees all of their texts."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from shared.config.models.pieces import make_pieces
from shared.model.scripted import ANSWER, script_of
from shared.wire.messages import Generate
from tests.clients.agent_programs import CLAUDE_CODE, CODEX, Agent
from tests.clients.record import FOLDER, MODEL, bodies_of
from tests.clients.words import BILLING
from tests.support.clusters import router_fake_node
from tests.support.clusters.router_fake_node import FakeNode
from tests.support.clusters.router_process import RouterProcess
from tests.support.machine.patience import HANG_GUARD_S

SAID = ("text", "output", "content")  # keys of an item or a block whose string is a text
PIECES = make_pieces()
FIXTURES = {file.stem: json.loads(file.read_text("utf-8")) for file in sorted(FOLDER.glob("*.json"))}
AGENTS = {agent.name: agent for agent in (CLAUDE_CODE, CODEX)}


def prompt_of(generate: Generate) -> str:
    return PIECES.decode(list(generate.prompt_ids)).decode()


def scripted_ids(generate: Generate, seq_index: int) -> Iterator[int]:
    """Yield what the scripted model says to this prompt."""
    yield from PIECES.encode(script_of(prompt_of(generate).encode().removesuffix(ANSWER)))
    while True:
        yield PIECES.eos_id


@pytest.fixture(scope="module")
def node() -> Iterator[tuple[RouterProcess, FakeNode]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router_fake_node, "answer_ids", scripted_ids)
        router = RouterProcess("--tool-format", "hermes", model=MODEL)
        fingerprint = msgspec.structs.replace(router_fake_node.FINGERPRINT, model=MODEL)
        node = FakeNode("decode", router.nodes, "d0", max_context=65536, fingerprint=fingerprint).start()
        yield router, node
        node.stop()
        assert router.stop() == 0


def send(url: str, request: dict[str, Any], body: dict[str, Any]) -> tuple[int, bytes]:
    """Send the recorded headers in their order, with the length of this body."""
    data = json.dumps(body, ensure_ascii=False).encode() if body else None
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=HANG_GUARD_S)
    connection.putrequest(request["method"], request["path"], skip_host=True, skip_accept_encoding=True)
    for line in request["headers"]:
        name, _, value = line.partition(": ")
        connection.putheader(name, str(len(data or b"")) if name.lower() == "content-length" else value)
    connection.endheaders(data)
    answer = connection.getresponse()
    try:
        return answer.status, answer.read()
    finally:
        connection.close()


def events_of(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("name", FIXTURES)
def test_a_recorded_session_is_answered_and_read_whole(name: str, node: tuple[RouterProcess, FakeNode]) -> None:
    router, heard = node
    fixture = FIXTURES[name]
    lost: list[str | None] = []
    answers: list[list[dict[str, Any]]] = []
    for request, body in zip(fixture["requests"], bodies_of(fixture), strict=True):
        if request["method"] == "POST":
            status, data = send(router.url, request, {**body, "model": MODEL})
            assert status == 200, data
            answers.append(events_of(data))
            assert len(texts_of(body)) >= 5
            lost.append(first_not_in(prompt_of(heard.generates[-1]), body))
    call, text = answers
    agent = AGENTS[fixture["program"]]
    if any(tool.get("name") == agent.tool for tool in body.get("tools", ())):
        check_call(agent, call)
    assert deltas(text).strip() == f"The tool said: {texts_of(body)[-1]}".strip()
    assert lost == [None, None]


def test_a_websocket_is_refused_so_that_codex_goes_on_without(node: tuple[RouterProcess, FakeNode]) -> None:
    """426 lets it do so at once. It asks seven times after a 404 or a 405, and ends after a 400."""
    router, _ = node
    upgrade, *_ = FIXTURES["codex-built-in-provider"]["requests"]
    assert upgrade["method"] == "GET" and "Upgrade: websocket" in upgrade["headers"]
    assert send(router.url, upgrade, {})[0] == 426


def check_call(agent: Agent, events: list[dict[str, Any]]) -> None:
    """Check that the stream holds one call, the asked-for one."""
    found = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    found += [event["item"] for event in events if event["type"] == "response.output_item.done"]
    (call,) = found
    assert call["type"] in ("tool_use", "function_call") and call["name"] == agent.tool
    assert json.loads(deltas(events)) == agent.given


def deltas(events: list[dict[str, Any]]) -> str:
    """Return the text of the stream, or the JSON text of its call."""
    found = []
    for event in events:
        if event["type"] == "content_block_delta":
            found.append(event["delta"].get("text") or event["delta"].get("partial_json", ""))
        elif event["type"] in ("response.output_text.delta", "response.function_call_arguments.delta"):
            found.append(event["delta"])
    return "".join(found)


def texts_of(body: dict[str, Any]) -> list[str]:
    """Return the texts of system prompt and conversation. A billing line is no text."""
    system = [body[key] for key in ("system", "instructions") if body.get(key)]
    found = texts_in([*system, *body.get("messages", ()), *body.get("input", ())])
    return [text for text in found if not text.startswith(BILLING)]


def texts_in(value: Any, key: str = "text") -> Iterator[str]:
    if isinstance(value, list):
        for part in value:
            yield from texts_in(part, key)
    elif isinstance(value, dict):
        for name in SAID:
            yield from texts_in(value.get(name), name)
    elif isinstance(value, str):
        yield value


def first_not_in(prompt: str, body: dict[str, Any]) -> str | None:
    """Return the first text that the prompt lacks, or has too early."""
    at = 0
    for text in texts_of(body):
        place = prompt.find(text, at)
        if place < 0:
            return text
        at = place + len(text)
    return None
