"""/v1/messages and /v1/responses through a real router, with Anthropic's and OpenAI's SDKs. The node says what the last
message tells it to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import TextBlock, ToolUseBlock

from tests.support.clusters.key_folders import write_key
from tests.support.clusters.router_fake_node import FakeNode
from tests.support.clusters.router_process import RouterProcess

MODEL = "hashlm"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
CALL = '<tool_call> {"name": "weather", "arguments": {"city": "Oslo", "days": 3}} </tool_call>'
CLAUDE_TOOL: Any = {"name": "weather", "description": "tells it", "input_schema": SCHEMA}
OPENAI_TOOL: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    key = tmp_path_factory.mktemp("key") / "key"
    write_key(key, "secret")
    router = RouterProcess("--tool-format", "hermes", "--api-key-file", str(key))
    node = FakeNode("decode", router.nodes, "d0").start()
    yield router
    node.stop()
    assert router.stop() == 0


@pytest.fixture(scope="module")
def claude(router: RouterProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=router.url, api_key="secret", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def client(router: RouterProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=router.url + "/v1", api_key="secret", max_retries=0) as client:
        yield client


def says(text: str) -> Any:
    return [{"role": "user", "content": f"say:{text}"}]


# ---- Anthropic's


def test_a_message(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(model=MODEL, max_tokens=50, messages=says("hello there"))
    assert [block.text for block in message.content if isinstance(block, TextBlock)] == ["hello there"]
    assert message.stop_reason == "end_turn" and message.role == "assistant" and message.model == MODEL
    assert message.usage.input_tokens > 10 and message.usage.output_tokens == len("hello there") + 1
    assert message._request_id, "the header request-id"


def test_a_message_comes_in_pieces(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(model=MODEL, max_tokens=50, messages=says("hello there")) as stream:
        pieces = list(stream.text_stream)
        message = stream.get_final_message()
    assert len(pieces) > 3 and "".join(pieces) == "hello there" and message.stop_reason == "end_turn"


def test_a_loop_with_a_tool(claude: anthropic.Anthropic) -> None:
    """A call, its result sent back, an answer."""
    messages = says(f"let me see {CALL}")
    asked = claude.messages.create(model=MODEL, max_tokens=200, messages=messages, tools=[CLAUDE_TOOL])
    assert asked.stop_reason == "tool_use"
    call = asked.content[-1]
    assert isinstance(call, ToolUseBlock) and call.input == {"city": "Oslo", "days": 3}
    said: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "3 C"}
    follow: Any = {"type": "text", "text": "say:it is cold"}
    messages += [{"role": "assistant", "content": asked.content}, {"role": "user", "content": [said, follow]}]
    answer = claude.messages.create(model=MODEL, max_tokens=50, messages=messages, tools=[CLAUDE_TOOL])
    assert [block.text for block in answer.content if isinstance(block, TextBlock)] == ["it is cold"]


def test_a_stop_sequence_and_a_cut_are_named(claude: anthropic.Anthropic) -> None:
    stopped = claude.messages.create(model=MODEL, max_tokens=50, messages=says("one two"), stop_sequences=["two"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "two")
    assert claude.messages.create(model=MODEL, max_tokens=3, messages=says("one two")).stop_reason == "max_tokens"


def test_tokens_are_counted_as_the_answer_counts_them(claude: anthropic.Anthropic) -> None:
    counted = claude.messages.count_tokens(model=MODEL, messages=says("hi"), system="be brief").input_tokens
    answer = claude.messages.create(model=MODEL, max_tokens=5, messages=says("hi"), system="be brief")
    assert counted == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def test_errors_are_anthropic_s(claude: anthropic.Anthropic, router: RouterProcess) -> None:
    with pytest.raises(anthropic.NotFoundError, match="is served") as missing:
        claude.messages.create(model="claude-opus", max_tokens=5, messages=says("hi"))
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="reads text only"):
        image: Any = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
        claude.messages.create(model=MODEL, max_tokens=5, messages=[{"role": "user", "content": [image]}])
    with (
        anthropic.Anthropic(base_url=router.url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(model=MODEL, max_tokens=5, messages=says("hi"))
    unknown = httpx.post(f"{router.url}/v1/messages/batches", json={})
    assert unknown.status_code == 404 and unknown.json()["error"]["type"] == "not_found_error"
    assert unknown.json()["request_id"] == unknown.headers["request-id"] == unknown.headers["x-request-id"]


def test_a_tool_runner_goes_on_without_a_thread(claude: anthropic.Anthropic) -> None:
    """The SDK asks for a thread first. It tells by the details of the error that it must send the conversation."""

    @anthropic.beta_tool
    def weather(city: str, days: int) -> str:
        return f"say:cold in {city} for {days} days"

    messages: Any = says(CALL)
    runner = claude.beta.messages.tool_runner(model=MODEL, max_tokens=200, messages=messages, tools=[weather])
    (said,) = runner.until_done().content
    assert said.type == "text" and said.text == "cold in Oslo for 3 days"


# ---- OpenAI's


def test_a_response(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="say:hello there", instructions="be brief", store=False)
    assert response.output_text == "hello there" and response.status == "completed"
    assert response.instructions == "be brief" and response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + len("hello there") + 1


def test_a_response_comes_in_pieces(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="say:hello there") as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert kinds.count("response.output_text.delta") > 3 and response.output_text == "hello there"


def test_a_loop_of_responses_with_a_tool(client: openai.OpenAI) -> None:
    """Without a memory: what the model said goes back as items."""
    items: Any = [{"role": "user", "content": f"say:{CALL}"}]
    asked = client.responses.create(model=MODEL, input=items, tools=[OPENAI_TOOL, {"type": "web_search"}])
    (call,) = asked.output
    assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Oslo", "days": 3}
    items += [item.to_dict() for item in asked.output]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "3 C"}]
    items += [{"role": "user", "content": "say:it is cold"}]
    answer = client.responses.create(model=MODEL, input=items, tools=[OPENAI_TOOL])
    assert answer.output_text == "it is cold"


def test_tools_that_nobody_here_can_run_are_named_in_the_header(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "web_search"}, OPENAI_TOOL, {"type": "custom", "name": "apply_patch"}]
    raw = client.responses.with_raw_response.create(model=MODEL, input="say:hi", tools=tools, user="me")
    assert raw.headers["x-baton-ignored-fields"] == "user,tools[0],tools[2]"
    assert [tool.type for tool in raw.parse().tools] == ["function"]


def test_what_would_need_a_memory_is_refused_by_name(client: openai.OpenAI) -> None:
    for name, value in {"previous_response_id": "resp_1", "background": True}.items():
        given: Any = {name: value}
        with pytest.raises(openai.BadRequestError, match=name) as error:
            client.responses.create(model=MODEL, input="say:hi", **given)
        assert error.value.param == name


def test_a_cut_response_is_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="say:hello there", max_output_tokens=4)
    assert response.status == "incomplete" and response.output_text == "hell"
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
