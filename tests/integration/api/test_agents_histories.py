"""What agents send, through a real router: their system prompts, parts that are no text, and their limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.clusters.router_fake_node import FakeNode
from tests.support.clusters.router_process import RouterProcess
from tests.support.machine.patience import HANG_GUARD_S

BILLING = "x-anthropic-billing-header: cc_version=0.0.0; cc_entrypoint=cli; cch={};"
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
TOOL = {"name": "w", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "w", "input": {}}


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    router = RouterProcess("--tool-format", "hermes", model="scripted")
    node = FakeNode("decode", router.nodes, "d0").start()
    yield router
    node.stop()
    assert router.stop() == 0


def post(router: RouterProcess, path: str, **body: Any) -> httpx.Response:
    sent = {"messages": [{"role": "user", "content": "hi"}]} | body
    return httpx.post(f"{router.url}{path}", json=sent, timeout=HANG_GUARD_S)


def counted(router: RouterProcess, *system: str) -> int:
    blocks = [{"type": "text", "text": text} for text in system]
    return int(post(router, "/v1/messages/count_tokens", system=blocks).json()["input_tokens"])


def test_a_billing_block_takes_no_prompt_with_it(router: RouterProcess) -> None:
    prompt = ["You are a coding agent.", "Answer only in French."]
    assert counted(router, BILLING.format("00000"), *prompt) == counted(router, *prompt) > counted(router) + 20
    assert counted(router, BILLING.format("0af31") + "".join(prompt)) == counted(router, *prompt)


def test_a_session_goes_on_after_a_tool_s_image(router: RouterProcess) -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "see"}, IMAGE]}
    history = [
        {"role": "user", "content": [{"type": "text", "text": "look"}]},
        {"role": "assistant", "content": [CALL]},
        {"role": "user", "content": [result]},
    ]
    for messages in (history, [*history, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "go on"}]):
        answer = post(router, "/v1/messages", max_tokens=4, messages=messages, tools=[TOOL])
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-baton-placeholders"] == "messages[2].content[0].content[1]"
    refused = post(router, "/v1/messages", max_tokens=4, messages=[{"role": "user", "content": [IMAGE]}])
    assert refused.status_code == 400 and "reads text only" in refused.text


def test_a_text_document_is_text(router: RouterProcess) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "The key is 42."}
    blocks = [{"type": "document", "title": "notes", "source": source}, {"type": "text", "text": "say: x"}]
    answer = post(router, "/v1/messages", max_tokens=4, messages=[{"role": "user", "content": blocks}])
    assert answer.status_code == 200 and "x-baton-placeholders" not in answer.headers


def test_a_limit_beyond_the_context_is_lowered_by_name(router: RouterProcess) -> None:
    chat = post(router, "/v1/chat/completions", max_tokens=32_000, logprobs=False, top_logprobs=0)
    assert chat.status_code == 200
    room = 4096 - chat.json()["usage"]["prompt_tokens"]
    assert chat.headers.get("x-baton-lowered") == f"max_tokens;from=32000;to={room}"
    fits = post(router, "/v1/chat/completions", max_tokens=5, max_completion_tokens=3)
    assert "x-baton-lowered" not in fits.headers and fits.headers["x-baton-ignored-fields"] == "max_tokens"
