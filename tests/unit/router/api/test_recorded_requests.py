"""Recorded requests of agents: each says of which program it is, holds no text of others."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from tests.clients import record
from tests.clients.agent_programs import CLAUDE_CODE
from tests.clients.log_server import Kept
from tests.clients.record import FOLDER, bodies_of, faults_of, fixture_of
from tests.clients.words import replaced

FIXTURES = {file.stem: json.loads(file.read_text("utf-8")) for file in sorted(FOLDER.glob("*.json"))}
CODEX_FIXTURE = FIXTURES["codex"]


@pytest.mark.parametrize("name", FIXTURES)
def test_a_fixture_says_program_version_and_date(name: str) -> None:
    assert faults_of(FIXTURES[name]) == []


def test_each_session_that_is_recorded_has_its_fixture() -> None:
    assert {session.fixture for session in record.SESSIONS} == set(FIXTURES)


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("program", "", "program: the name"),
        ("version", "", "version: "),
        ("version", None, "version: "),
        ("date", "last week", "date: "),
        ("own_texts", ["a text of others"], "own_texts: "),
        ("requests", [], "requests: one at least"),
    ],
)
def test_a_fixture_without_these_is_refused(key: str, value: object, fault: str) -> None:
    (found,) = faults_of({**CODEX_FIXTURE, key: value})
    assert found.startswith(fault)
    assert faults_of({name: part for name, part in CODEX_FIXTURE.items() if name != key})


def test_a_text_that_is_as_it_was_is_found() -> None:
    fixture = copy.deepcopy(CODEX_FIXTURE)
    fixture["requests"][0]["body"]["tools"][0]["description"] += " Runs it."
    assert faults_of(fixture) == ["requests[0].body: a text is as it was"]


def test_an_id_or_another_host_in_headers_is_found() -> None:
    fixture = copy.deepcopy(CODEX_FIXTURE)
    session = "session-id: 0199a1b2-0000-7000-8000-000000000001"
    fixture["requests"][1]["headers"] = [session, "host: 10.0.0.1"]
    first, second = faults_of(fixture)
    assert first.endswith(session) and second == "requests[1].headers: Host: 127.0.0.1:8000"


def test_words_replace_texts_and_keep_what_is_protocol() -> None:
    text = "<system-reminder>\nDon't run `ls -l /root` 12 times!\n</system-reminder>"
    schema = {"type": "object", "required": ["description"], "properties": {"description": {"description": "A Path."}}}
    said = replaced({"type": "text", "text": text, "input_schema": schema, "kept": "own"}, {"own"})
    assert said["text"].startswith("<system-reminder>\n") and said["text"].endswith("!\n</system-reminder>")
    assert len(said["text"]) == len(text) and not {"run", "root", "times", "12"} & set(said["text"].split())
    described = said["input_schema"]["properties"]["description"]["description"]
    assert said["input_schema"] == {**schema, "properties": {"description": {"description": described}}}
    assert described != "A Path." and len(described) == len("A Path.") and described[0].isupper()
    assert said["type"] == "text" and said["kept"] == "own" and replaced(said, {"own"}) == said


def test_ids_are_zeros_wherever_they_stand() -> None:
    held = {"id": "msg_01a22018-d6b0-7a91-b048-060da96d7823", "user_id": '{"device_id": "0123456789abcdef"}'}
    zeros = {"id": "msg_00000000-0000-0000-0000-000000000000", "user_id": '{"device_id": "0000000000000000"}'}
    assert replaced(held, ()) == zeros
    assert replaced({"client_metadata": {"thread": held["id"]}}, ()) == {"client_metadata": {"thread": zeros["id"]}}


def test_parts_as_before_are_written_once() -> None:
    tools = [{"name": "f"}]
    bodies: list[dict[str, Any]] = [
        {"tools": tools, "input": [{"id": "a"}, {"id": "b"}], "store": False},
        {},
        {"tools": tools, "input": [{"id": "a"}], "store": False},
        {"tools": tools, "input": [{"id": "a"}, {"id": "c"}, {"id": "a"}], "store": False},
    ]
    kept = [Kept("POST", "/", (("Host", "h"),), json.dumps(body).encode() if body else b"") for body in bodies]
    fixture = fixture_of(record.SESSIONS[2], "1.2.3", "2026-01-01", kept)
    assert fixture["requests"][3]["body"] == {
        "tools": record.AS_BEFORE,
        "input": [record.AS_BEFORE, {"id": "c"}, {"id": "a"}],
        "store": False,
    }
    assert bodies_of(fixture) == bodies and faults_of(fixture) == []


def test_the_asked_for_call_is_in_the_prompt() -> None:
    assert json.loads(CLAUDE_CODE.call.removeprefix("say:<tool_call>").removesuffix("</tool_call>")) == {
        "name": "Bash",
        "arguments": dict(CLAUDE_CODE.given),
    }
