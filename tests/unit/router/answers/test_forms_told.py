"""What a client and an operator are told of a conversation's form, and arguments of past calls at every endpoint."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any
from unittest.mock import Mock

import pytest

from router.api.answer.generation_plan import Contexts, GenerationPlan
from router.api.anthropic.messages import COUNT_TOKENS, MESSAGES, Messages, counted
from router.api.ask.generation_api import GenerationApi
from router.api.ask.resolve import Resolver
from router.api.fields.parse import BodyParser
from router.api.ollama.ollama import OLLAMA_CHAT, OllamaChat
from router.api.openai.chat import CHAT, Chat
from router.api.openai.chat_task import tell_form
from router.api.openai.responses import RESPONSES, Responses
from router.api.openai.tokenization import TOKENIZE, tokenized
from router.http.ignored import LOST, NORMALIZED
from router.text.chat.chat_template import JinjaTemplate
from router.text.chat.interface import TextModel
from router.text.scripted import scripted_text_model
from shared.config.settings.settings import LimitsConfig
from shared.observe.log_once import LogOnce
from tests.support.bodies.odd_histories import called, result, system, user
from tests.unit.router.http.test_held_bodies import COUNT, Site, run

ITEMS = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
SOURCE = ITEMS + "{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}{% endfor %}|{% endfor %}"
ONE_SYSTEM = "{% for m in messages if m.role != 'system' or m == messages[0] %}{{ m.content }}|{% endfor %}"
CONTEXT = 4096
CASES = [
    ('{"city": "Ro', '<arguments>{"city": "Ro'),
    ('{"city": "Rome\nor so"}', "<city>Rome\nor so"),
    ('"Rome"', "<arguments>Rome"),
    (["Rome"], "<arguments>['Rome']"),
    ("Rome", "<arguments>Rome"),
    ({"city": "Rome"}, "<city>Rome"),
    ("null", ""),
    ("", ""),
    (None, ""),
]


def resolver(source: str = SOURCE) -> Resolver:
    tokenizer = scripted_text_model().tokenizer
    return Resolver("m", TextModel(tokenizer, JinjaTemplate({"default": source}, {}, {})), LimitsConfig())


def text_of(ids: list[int]) -> str:
    tokenizer = scripted_text_model().tokenizer
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


def planned(api: GenerationApi[Any], table: Any, body: dict[str, Any], source: str = SOURCE) -> GenerationPlan:
    parsed = BodyParser(table).parse(json.dumps(body).encode()).body
    return api.plan(parsed, resolver(source), Contexts(CONTEXT, CONTEXT))


def chat_body(arguments: Any) -> dict[str, Any]:
    return {"messages": [user(), called(arguments), result()]}


def claude_body(arguments: Any) -> dict[str, Any]:
    call = {"type": "tool_use", "id": "t", "name": "get_weather", "input": arguments}
    answer = {"type": "tool_result", "tool_use_id": "t", "content": "Qr1"}
    messages = [user(), {"role": "assistant", "content": [call]}, {"role": "user", "content": [answer]}]
    return {"messages": messages, "max_tokens": 4}


def responses_body(arguments: Any) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "t", "name": "get_weather", "arguments": arguments}
    return {"input": [user(), call, {"type": "function_call_output", "call_id": "t", "output": "Qr1"}]}


def ollama_body(arguments: Any) -> dict[str, Any]:
    call = {"function": {"name": "get_weather", "arguments": arguments}}
    return {"messages": [user(), {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "Qr1"}]}


@pytest.mark.parametrize(("given", "shown"), CASES)
@pytest.mark.parametrize(
    ("api", "table", "body"),
    [
        (Chat(), CHAT, chat_body),
        (Messages(), MESSAGES, claude_body),
        (Responses(), RESPONSES, responses_body),
        (OllamaChat(), OLLAMA_CHAT, ollama_body),
    ],
    ids=["chat", "messages", "responses", "ollama"],
)
def test_any_arguments_of_a_past_call_are_read(api: Any, table: Any, body: Any, given: Any, shown: str) -> None:
    plan = planned(api, table, body(given))
    assert text_of(plan.jobs[0].ids) == f"user:Qu1|assistant:get_weather{shown}|tool:Qr1|"
    assert not plan.headers


TWO_SYSTEMS = [user(), system(), system("Qs2")]


def test_the_form_is_in_the_headers_of_every_endpoint() -> None:
    asked = {"messages": TWO_SYSTEMS}
    plan = planned(Chat(), CHAT, asked, ONE_SYSTEM)
    assert text_of(plan.jobs[0].ids) == "Qs1\n\nQs2|Qu1|"
    expected = {NORMALIZED: b"systems-merged"}
    assert plan.headers == expected
    assert planned(OllamaChat(), OLLAMA_CHAT, asked, ONE_SYSTEM).headers == expected
    headers: dict[bytes, bytes] = {}
    body: Any = BodyParser(TOKENIZE).parse(json.dumps(asked).encode()).body
    assert tokenized(body, resolver(ONE_SYSTEM), CONTEXT, headers)["tokens"] == plan.jobs[0].ids
    assert headers == expected
    headers.clear()
    body = BodyParser(COUNT_TOKENS).parse(json.dumps({"messages": TWO_SYSTEMS}).encode()).body
    assert counted(body, resolver(ONE_SYSTEM), headers) == {"input_tokens": len(plan.jobs[0].ids)}
    assert headers == expected


@pytest.mark.parametrize("path", ["/tokenize", COUNT, "/v1/chat/completions", "/v1/messages"])
def test_a_response_names_the_form_and_the_log_has_it(path: str) -> None:
    async def told(site: Site, go: threading.Event) -> None:
        site.model.resolver = resolver(ONE_SYSTEM)
        more = {} if path in ("/tokenize", COUNT) else {"max_tokens": 1}
        await site.ask(json.dumps({"messages": TWO_SYSTEMS, **more}).encode(), [], asyncio.Event(), path)
        assert (NORMALIZED, b"systems-merged") in site.sent[0]["headers"]  # type: ignore[operator]
        assert site.once.info.call_args.kwargs == {"steps": "systems-merged"}

    run(told)


def test_lost_texts_are_named() -> None:
    plan = planned(Chat(), CHAT, {"messages": [user(), user("Qu2")]}, "{{ messages | length }}")
    assert text_of(plan.jobs[0].ids) == "2" and plan.headers == {LOST: b"messages[0].content,messages[1].content"}
    many = [user() for _ in range(40)]
    plan = planned(Chat(), CHAT, {"messages": many}, "{{ messages | length }}")
    assert plan.headers[LOST].endswith(b",messages[15].content,...")


def test_each_form_is_logged_once() -> None:
    log = Mock()
    once = LogOnce(log, interval_s=float("inf"))
    for headers in ({}, {NORMALIZED: b"a,b"}, {NORMALIZED: b"a,b"}, {NORMALIZED: b"a"}):
        tell_form(once, headers)
    assert [call.args[0] for call in log.write.call_args_list] == ["info", "info"]
    assert [call.args[2] for call in log.write.call_args_list] == [{"steps": "a,b"}, {"steps": "a"}]
    log.reset_mock()
    for lost in (b"messages[3].content,messages[12].content", b"messages[7].content", b"messages[7].tool_calls"):
        tell_form(once, {LOST: lost})
    assert [(call.args[0], call.args[2]) for call in log.write.call_args_list] == [
        ("warning", {"parts": "messages.content"}), ("warning", {"parts": "messages.tool_calls"})
    ]  # fmt: skip
