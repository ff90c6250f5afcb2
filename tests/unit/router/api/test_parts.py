"""Images, files, documents and foreign calls: which become text, which a placeholder, which an error."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.anthropic.messages import MESSAGES, conversation_of
from router.api.ask.parts import AnyPart, Parts, newest_user
from router.api.fields.parse import BodyParser
from router.api.openai.chat import CHAT
from router.api.openai.chat_messages import turns_of as chat_turns
from router.api.openai.responses import RESPONSES
from router.api.openai.responses_input import turns_of as responses_turns
from shared.core.errors import InvalidRequest

PARSERS = {table.path: BodyParser(table) for table in (CHAT, MESSAGES, RESPONSES)}
SEEN = "[{} left out: this model reads text only]"
PNG = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
IMAGE = {"type": "image", "source": PNG}
IMAGE_URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
INPUT_IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo=", "detail": "auto"}
CALL = {"type": "tool_use", "id": "t", "name": "w", "input": {}}
ITEM_CALL = {"type": "function_call", "call_id": "t", "name": "w", "arguments": "{}"}
OK = {"role": "assistant", "content": "ok"}
GO_ON = {"role": "user", "content": "go on"}
IN_TEXT = base64.b64encode("Der Schlüssel ist 42.".encode()).decode()

Turns = list[dict[str, Any]]


def parsed(path: str, body: dict[str, Any]) -> Any:
    return PARSERS[path].parse(msgspec.json.encode(body)).body


def of_chat(messages: list[Any], parts: Parts) -> Turns:
    return list(chat_turns(parsed(CHAT.path, {"messages": messages}).messages, parts))


def of_claude(messages: list[Any], parts: Parts) -> Turns:
    body = parsed(MESSAGES.path, {"messages": messages, "max_tokens": 1})
    return [dict(turn) for turn in conversation_of(body, (), parts).messages]


def of_responses(items: list[Any], parts: Parts) -> Turns:
    return list(responses_turns(None, parsed(RESPONSES.path, {"input": items}).input, parts))


Reader = Callable[[list[Any], Parts], Turns]
APIS: list[Any] = [
    pytest.param(of_chat, IMAGE_URL, id="chat"),
    pytest.param(of_claude, IMAGE, id="messages"),
    pytest.param(of_responses, INPUT_IMAGE, id="responses"),
]


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize(("read", "image"), APIS)
def test_an_image_is_refused_only_in_the_newest_message(read: Reader, image: dict[str, Any]) -> None:
    parts = Parts()
    turns = read([user(image), OK, GO_ON], parts)
    assert [turn["content"] for turn in turns] == [SEEN.format(image["type"]), "ok", "go on"]
    assert len(parts.replaced) == 1 and parts.replaced[0].endswith("[0].content[0]")
    for messages in ([user(image)], [GO_ON, OK, user(image)], [user(image), OK]):
        with pytest.raises(InvalidRequest, match="reads text only"):
            read(messages, Parts())
    with pytest.raises(InvalidRequest, match="reads text only") as error:
        read([user(image), OK, GO_ON], Parts(keeps=False))
    assert str(error.value.param).endswith("[0].content[0].type")


@pytest.mark.parametrize(
    ("roles", "newest"),
    [
        ([], None),
        (["system"], None),
        (["user"], 0),
        (["user", "assistant"], 0),
        (["user", "assistant", "user", "system"], 2),
        (["user", "assistant", "tool"], None),
        (["user", "assistant", "tool", "user"], None),
        (["user", "assistant", "tool", "assistant", "user"], 4),
        (["tool", "system", "user"], None),
    ],
)
def test_only_a_person_s_message_is_the_newest(roles: list[str], newest: int | None) -> None:
    assert newest_user(roles) == newest


def test_a_tool_s_image_has_a_placeholder_in_the_newest_result() -> None:
    said = SEEN.format("image")
    see = {"type": "text", "text": "see "}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [see, IMAGE]}
    called = {"role": "assistant", "content": [CALL]}
    turns = of_claude([GO_ON, called, user(result)], parts := Parts())
    assert turns[-1] == {"role": "tool", "tool_call_id": "t", "content": f"see {said}"}
    assert parts.replaced == ["messages[2].content[0].content[1]"]
    assert of_claude([GO_ON, called, user(result, IMAGE)], Parts())[-1]["content"] == said
    assert of_claude([GO_ON, called, user(result), user(IMAGE)], Parts())[-1]["content"] == said
    items = [GO_ON, ITEM_CALL, {"type": "function_call_output", "call_id": "t", "output": [INPUT_IMAGE]}]
    assert of_responses(items, Parts())[-1]["content"] == SEEN.format("input_image")


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (
            {
                "type": "document",
                "title": "notes",
                "source": {"type": "text", "media_type": "text/plain", "data": "The key is 42."},
            },
            '<document title="notes">\nThe key is 42.\n</document>\n',
        ),
        (
            {"type": "document", "context": "a \"b\"", "source": {"type": "content", "content": "x"}},
            '<document context="a \\"b\\"">\nx\n</document>\n',
        ),
        (
            {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "x"}] * 2}},
            "<document>\nx\nx\n</document>\n",
        ),
        (
            {"type": "document", "source": {"type": "base64", "media_type": "text/markdown", "data": IN_TEXT}},
            "<document>\nDer Schlüssel ist 42.\n</document>\n",
        ),
        (
            {
                "type": "search_result", "title": "T", "source": "https://x", "citations": {"enabled": True},
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            '<search_result title="T" source="https://x">\na\nb\n</search_result>\n',
        ),
        ({"type": "tool_reference", "tool_name": "grep"}, "<tool_reference>\ngrep\n</tool_reference>\n"),
    ],
)  # fmt: skip
def test_documents_and_search_results_are_text_anywhere(block: dict[str, Any], text: str) -> None:
    assert of_claude([user(block)], parts := Parts(keeps=False))[0]["content"] == text
    assert not parts.replaced
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    messages = [GO_ON, {"role": "assistant", "content": [CALL]}, user(result)]
    assert of_claude(messages, Parts(keeps=False))[-1]["content"] == text


@pytest.mark.parametrize(
    "source",
    [
        {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="},
        {"type": "base64", "media_type": "text/plain", "data": "/w=="},
        {"type": "base64", "media_type": "text/plain", "data": "no base64"},
        {"type": "content", "content": [{"type": "text", "text": "x"}, IMAGE]},
        {"type": "url", "url": "https://x/y.pdf"},
        {"type": "file", "file_id": "f"},
        {"type": "text", "data": 1},
        {},
        "x",
        7,
    ],
)
def test_a_document_without_text_is_none(source: Any) -> None:
    block = {"type": "document", "source": source}
    assert of_claude([user(block), OK, GO_ON], Parts())[0]["content"] == SEEN.format("document")
    with pytest.raises(InvalidRequest):
        of_claude([user(block)], Parts())


def test_text_files_of_openai_s_apis_are_text() -> None:
    data, shown = f"data:text/plain;base64,{IN_TEXT}", "Der Schlüssel ist 42."
    file = {"type": "file", "file": {"filename": "a.txt", "file_data": data}}
    assert of_chat([user(file)], Parts())[0]["content"] == f'<file title="a.txt">\n{shown}\n</file>\n'
    item = {"type": "input_file", "filename": "a.txt", "file_data": data}
    assert of_responses([user(item)], Parts())[0]["content"] == f'<input_file title="a.txt">\n{shown}\n</input_file>\n'
    for unread in ({"file_data": "data:application/pdf;base64,JVBERi0="}, {"file_id": "f"}, {"file_data": 3}):
        with pytest.raises(InvalidRequest, match="reads text only"):
            of_chat([user({"type": "file", "file": unread})], Parts())
        with pytest.raises(InvalidRequest, match="reads text only"):
            of_responses([user({"type": "input_file"} | unread)], Parts())


def test_calls_of_a_foreign_server_are_text() -> None:
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}}
    page = {"type": "web_search_result", "url": "https://x", "title": "X", "encrypted_content": "abc", "page_age": "1d"}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": [page]}
    ran = {
        "type": "bash_code_execution_tool_result",
        "tool_use_id": "s",
        "content": {"type": "bash_code_execution_result", "stdout": "1", "stderr": "", "return_code": 0},
    }
    failed = {"type": "mcp_tool_result", "tool_use_id": "m", "content": [{"type": "text", "text": "no"}]}
    own = {"role": "assistant", "content": [search, found, ran, failed, {"type": "text", "text": "Done."}]}
    turns = of_claude([GO_ON, own, GO_ON], parts := Parts(keeps=False))
    assert turns[1]["content"].split("\n") == [
        '<server_tool_use name="web_search">', '{"query":"x"}', "</server_tool_use>",
        "<web_search_tool_result>", '{"title":"X","url":"https://x","page_age":"1d"}', "</web_search_tool_result>",
        "<bash_code_execution_tool_result>", '{"stdout":"1","stderr":"","return_code":0}',
        "</bash_code_execution_tool_result>",
        "<mcp_tool_result>", "no", "</mcp_tool_result>", "Done.",
    ]  # fmt: skip
    assert not parts.replaced


def test_calls_of_openai_s_own_tools_are_calls() -> None:
    """A session may have begun at OpenAI."""
    shell = {"type": "local_shell_call", "call_id": "a", "action": {"type": "exec", "command": ["ls"]}, "id": "x"}
    shell_out = {"type": "local_shell_call_output", "call_id": "a", "id": "x", "output": "f"}
    patch = {"type": "custom_tool_call", "call_id": "b", "name": "apply_patch", "input": "*** Begin"}
    patch_out = {"type": "custom_tool_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "done"}]}
    run = {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}}
    run_out = {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "f", "stderr": "w", "outcome": {}}]}
    look = {"type": "computer_call", "call_id": "d", "actions": [{"type": "screenshot"}]}
    shot = {"type": "computer_screenshot", "image_url": "data:"}
    look_out = {"type": "computer_call_output", "call_id": "d", "output": shot}
    seek = {"type": "tool_search_call", "call_id": "e", "arguments": {"goal": "x"}, "execution": "client"}
    seek_out = {"type": "tool_search_output", "call_id": "e", "tools": [{"name": "f"}]}
    items = [shell, shell_out, patch, patch_out, run, run_out, look, look_out, seek, seek_out]
    turns = of_responses([GO_ON, *items], parts := Parts())
    calls = [turn["tool_calls"][0]["function"] for turn in turns if turn.get("tool_calls")]
    assert calls == [
        {"name": "local_shell", "arguments": {"type": "exec", "command": ["ls"]}},
        {"name": "apply_patch", "arguments": {"input": "*** Begin"}},
        {"name": "shell", "arguments": {"commands": ["ls"]}},
        {"name": "computer", "arguments": {"actions": [{"type": "screenshot"}]}},
        {"name": "tool_search", "arguments": {"goal": "x"}},
    ]
    results = [turn["content"] for turn in turns if turn["role"] == "tool"]
    assert results == ["f", "done", "f\nw", SEEN.format("computer_screenshot"), '{"name":"f"}']
    assert parts.replaced == ["input[8].output"]
    custom = {"id": "b", "type": "custom", "custom": {"name": "apply_patch", "input": "*** Begin"}}
    (turn,) = of_chat([{"role": "assistant", "tool_calls": [custom]}], Parts())
    function = {"name": "apply_patch", "arguments": {"input": "*** Begin"}}
    assert turn["tool_calls"] == [{"id": "b", "type": "function", "function": function}]


def test_items_that_say_nothing_end_no_session() -> None:
    search = {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "x"}}
    picture = {"type": "image_generation_call", "id": "i", "result": "iVBORw0KGgo="}
    packed = {"type": "compaction", "id": "c", "encrypted_content": "x"}
    turns = of_responses([GO_ON, search, picture, packed, OK, GO_ON], parts := Parts())
    assert turns[1]["content"] == (
        '<web_search_call>\n{"action":{"type":"search","query":"x"}}\n</web_search_call>\n'
        + SEEN.format("image_generation_call") + SEEN.format("compaction") + "ok"
    )  # fmt: skip
    assert parts.replaced == ["input[2]", "input[3]"]
    with pytest.raises(InvalidRequest, match="items are message"):
        of_responses([GO_ON, {"type": "item_reference", "id": "x"}], Parts())
    with pytest.raises(InvalidRequest, match="items are message"):
        of_responses([picture, GO_ON], Parts(keeps=False))


def test_what_an_earlier_answer_spoke_is_its_transcript() -> None:
    spoken = {"role": "assistant", "content": None, "audio": {"id": "a", "transcript": "Hi."}}
    assert of_chat([GO_ON, spoken, GO_ON], Parts())[1]["content"] == "Hi."
    assert of_chat([GO_ON, {**spoken, "audio": {"id": "a"}}, GO_ON], Parts())[1]["content"] == SEEN.format("audio")


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.text(max_size=4)
    | st.sampled_from(["data:text/x;base64,eA==", "eA=="]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "data", "content", "media_type", "file_data", "filename", "transcript"]),
            inner,
        )
    ),
    max_leaves=6,
)
kinds = st.sampled_from(
    [
        "text",
        "document",
        "file",
        "input_file",
        "search_result",
        "tool_reference",
        "server_tool_use",
        "image",
        "x_tool_result",
    ]
)
fields = st.sampled_from([name for name in AnyPart.__struct_fields__ if name not in ("type", "text")])


@given(kinds, st.dictionaries(fields, json_values, max_size=4))
def test_any_part_is_text_a_placeholder_or_an_error(kind: str, given_fields: dict[str, Any]) -> None:
    for read in (of_chat, of_claude, of_responses):
        for part in ({"type": kind} | given_fields, {"type": "tool_result", "content": given_fields.get("content")}):
            try:
                turns = read([user(part), OK, GO_ON], Parts())
            except InvalidRequest:
                continue
            assert all(isinstance(turn["content"], str) for turn in turns)
