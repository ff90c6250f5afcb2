"""What is asked of a server and how; golden answers in both APIs' forms; nodes that come back."""

from __future__ import annotations

import json
import math

import pytest

from deploy.router_url import parse_url
from deploy.tools.traffic import drills
from deploy.tools.traffic.drills import Planned, ready_nodes, take_away
from deploy.tools.traffic.golden_run import ask, margin, margins_of
from deploy.tools.traffic.request_builder import CALL_TOKENS, RequestBuilder
from deploy.tools.traffic.target import Target, look_at, resolve
from deploy.tools.traffic.workloads.workload import Session, Turn
from shared.core.errors import ConfigError


def test_names_are_resolved_once_and_https_brings_tls():
    plain = resolve(parse_url("http://127.0.0.1:81"))
    assert (plain.sockaddr, plain.tls) == (("127.0.0.1", 81), None)
    assert resolve(parse_url("https://127.0.0.1")).tls is not None
    with pytest.raises(ConfigError):
        resolve(parse_url("http://no-such-host.invalid"))


class Server:
    """Answers from a table, keeps what it was asked."""

    def __init__(self, *answers):
        self.url = parse_url("http://h:1")
        self.answers, self.asked = list(answers), []

    def get(self, path):
        self.asked.append(path)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def post(self, path, body, timeout_s):
        self.asked.append((path, json.loads(body)))
        return self.answers.pop(0)


def models(*cards):
    return 200, json.dumps({"data": [{"id": name, "owned_by": owner} for name, owner in cards]}).encode()


def test_the_named_or_first_model_and_the_server_s_kind_are_told():
    ours = look_at(Server(models(("a", "baton"), ("b", "baton"))), "")
    assert (ours.model, ours.is_ours) == ("a", True)
    other = look_at(Server(models(("a", "vllm"))), "lora")
    assert (other.model, other.is_ours) == ("lora", False)
    assert look_at(Server((404, b"")), "m").is_ours is False


@pytest.mark.parametrize("answer", [(401, b"key?"), (200, b"[]"), (200, b'{"data": []}'), (200, b"<html>")])
def test_a_server_that_names_no_model(answer):
    with pytest.raises(ConfigError, match="--model"):
        look_at(Server(answer), "")


MESSAGES = (("system", "Be brief."), ("user", "Why?"))


def body_of(builder, more=None):
    return json.loads(builder.body(MESSAGES, 8, more))


def test_bodies():
    ours, other = (Target(parse_url("http://h:1/x"), "m", is_ours) for is_ours in (True, False))
    chat = body_of(RequestBuilder(ours))
    assert chat["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    assert chat["ignore_eos"] and chat["return_token_ids"] and chat["stream_options"] == {"include_usage": True}
    plain = body_of(RequestBuilder(other, "completions", temperature=0.5))
    assert (plain["prompt"], plain["temperature"]) == ("Be brief.\nWhy?", 0.5)
    assert "ignore_eos" not in plain and "messages" not in plain
    values = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # a server's defaults have no say
    assert [chat[name] for name in values] == [0.0, 1.0, 0, 0.0, 1.0]
    assert plain["top_p"] == 1.0 and not {*values[2:]} & set(plain)  # not every server knows the others


def test_extra_fields_go_over_all_else_and_null_takes_away():
    builder = RequestBuilder(
        Target(parse_url("http://h:1"), "m", True), extra={"stream_options": None, "max_tokens": 3, "k": 1}
    )
    body = body_of(builder, {"stream": None})
    assert (body["max_tokens"], body["k"]) == (3, 1) and not {"stream", "stream_options"} & set(body)


CALLED = (("user", "Why?"), ("call", '{"command":"ls"}'), ("tool", "a b"))


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_request_with_tools(is_ours):
    builder = RequestBuilder(Target(parse_url("http://h:1"), "m", is_ours))
    body = json.loads(builder.message(CALLED, 8, "required").partition(b"\r\n\r\n")[2])
    asked, called, result = body["messages"]
    (call,) = called["tool_calls"]
    assert asked == {"role": "user", "content": "Why?"} and (called["role"], called["content"]) == ("assistant", None)
    assert result == {"role": "tool", "content": "a b", "tool_call_id": call["id"]}
    assert call["function"] == {"name": body["tools"][0]["function"]["name"], "arguments": CALLED[1][1]}
    assert (body["tool_choice"], body["max_tokens"]) == ("required", CALL_TOKENS)
    assert body.get("ignore_eos") is (False if is_ours else None)
    free = json.loads(builder.message(CALLED, 8, "auto").partition(b"\r\n\r\n")[2])
    assert (free["tool_choice"], free["max_tokens"], free["tools"]) == ("auto", 8, body["tools"])


def test_a_request_as_bytes():
    builder = RequestBuilder(Target(parse_url("http://h:1/x/v1"), "m", False), api_key="secret")
    head, body = builder.message(MESSAGES, 8).split(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /x/v1/chat/completions HTTP/1.1" and "Host: h:1" in lines
    assert f"Content-Length: {len(body)}" in lines and "Authorization: Bearer secret" in lines


PROBE = Session((Turn("Why?", 8),), (("system", "Be brief."),), 0)


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("is_ours", [True, False])
def test_golden_answers(api, is_ours):
    choice = {"message": {"content": "ab"}} if api == "chat" else {"text": "ab"}
    if is_ours:
        choice["token_ids"] = [1, 2]
        rows = [{"a": -0.5, "b": -2.0}, {"a": -1.0}]
        entries = [{"top_logprobs": [{"logprob": value} for value in row.values()]} for row in rows]
        choice["logprobs"] = {"content": entries} if api == "chat" else {"top_logprobs": rows}
    server = Server((200, json.dumps({"choices": [choice]}).encode()))
    golden = ask(server, RequestBuilder(Target(server.url, "m", is_ours), api), PROBE, 5.0)
    assert (golden.text, golden.ids) == ("ab", (1, 2) if is_ours else ())
    assert golden.margins == ((1.5, 0.0) if is_ours else ())
    assert golden.as_session(0) == PROBE
    ((path, body),) = server.asked
    assert path.endswith("completions") and "stream" not in body and ("logprobs" in body) == is_ours


@pytest.mark.parametrize("answer", [(500, b"x"), (200, b"{}"), (200, b'{"choices": []}')])
def test_no_golden_answer(answer):
    server = Server(answer)
    with pytest.raises(ConfigError, match="--golden 0"):
        ask(server, RequestBuilder(Target(server.url, "m", False)), PROBE, 5.0)


def test_margins():
    assert margin([-3.0, -1.0, -1.25]) == 0.25 and margin([-1.0]) == 0.0 == margin([])
    assert margins_of({}) == () == margins_of({"logprobs": None})


def ready(*names):
    nodes = [{"node": name, "ready": name in names} for name in ("decode-0", "decode-1")]
    return (200 if names else 503), json.dumps({"nodes": nodes}).encode()


def test_ready_nodes():
    assert ready_nodes(Server(ready("decode-1"))) == {"decode-1"}
    assert ready_nodes(Server(ready())) == set() == ready_nodes(Server((200, b"x")))


@pytest.fixture
def clock(monkeypatch):
    """Time that goes by sleeping alone."""
    now = [0.0]
    monkeypatch.setattr(drills.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(drills.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def test_a_node_counts_as_back_when_it_was_seen_away(clock):
    server = Server(ready("decode-1"), ready("decode-1"), ready("decode-0"), ready("decode-0"), ready("decode-1"))
    done = []
    back = take_away(Planned("kill", "decode-1", 0.0), lambda: done.append(1), server, 60.0)
    assert done == [1] and back == pytest.approx(4 * drills.POLL_S)


def test_or_when_the_router_must_have_noticed(clock):
    back = take_away(Planned("restart", "decode-1", 0.0), lambda: None, Server(ready("decode-1")), 60.0)
    assert back == pytest.approx(drills.NOTICED_S, abs=drills.POLL_S)


def test_a_node_that_stays_away(clock):
    assert math.isnan(take_away(Planned("kill", "decode-1", 0.0), lambda: None, Server(ready("decode-0")), 5.0))
    server = Server(ready("decode-1"))
    assert math.isnan(take_away(Planned("drain", "decode-1", 0.0), lambda: None, server, 5.0)) and not server.asked
