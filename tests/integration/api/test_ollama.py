"""Ollama's API through a real router. The node says what the last message tells it to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from tests.support.clusters.key_folders import write_key
from tests.support.clusters.router_fake_node import FakeNode
from tests.support.clusters.router_process import RouterProcess
from tests.support.machine.patience import HANG_GUARD_S

CALL = '<tool_call> {"name": "weather", "arguments": {"city": "Oslo", "days": 3}} </tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "tells it", "parameters": SCHEMA}}
TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
Json = dict[str, Any]


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
def client(router: RouterProcess) -> Iterator[httpx.Client]:
    headers = {"Authorization": "Bearer secret"}
    with httpx.Client(base_url=router.url, headers=headers, timeout=HANG_GUARD_S) as client:
        yield client


def ask(client: httpx.Client, path: str, **body: Any) -> Json:
    answer = client.post(path, json={"model": "hashlm", "stream": False, **body}).raise_for_status()
    assert answer.headers["content-type"] == "application/json"
    found: Json = answer.json()
    return found


def lines(client: httpx.Client, path: str, **body: Any) -> list[Json]:
    """Ask as Ollama's clients do by default: without a word on streams."""
    answer = client.post(path, json={"model": "hashlm:latest", **body}).raise_for_status()
    assert answer.headers["content-type"] == "application/x-ndjson" and answer.text.endswith("}\n")
    found = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    assert {line["model"] for line in found} == {"hashlm:latest"}
    return found


def says(text: str) -> list[Json]:
    return [{"role": "user", "content": f"say:{text}"}]


# ---- chats


def test_a_chat_comes_in_lines(client: httpx.Client) -> None:
    found = lines(client, "/api/chat", messages=says("hello there"))
    assert "".join(line["message"]["content"] for line in found) == "hello there" and len(found) > 3
    assert {line["message"]["role"] for line in found} == {"assistant"}
    assert found[-1]["done_reason"] == "stop" and found[-1]["eval_count"] == len("hello there") + 1


def test_a_whole_chat_has_counts_and_times(client: httpx.Client) -> None:
    before = datetime.now(UTC)
    answer = ask(client, "/api/chat", messages=says("hello"))
    assert answer["message"] == {"role": "assistant", "content": "hello"} and answer["done"]
    assert answer["prompt_eval_count"] == len("user: say:hello assistant: ") and answer["eval_count"] == 6
    assert all(isinstance(answer[name], int) and answer[name] >= 0 for name in TIMES)
    assert answer["total_duration"] == answer["prompt_eval_duration"] + answer["eval_duration"]
    assert 0 < answer["prompt_eval_duration"] < answer["total_duration"]
    assert abs((datetime.fromisoformat(answer["created_at"]) - before).total_seconds()) < HANG_GUARD_S


def test_a_loop_with_a_tool(client: httpx.Client) -> None:
    """A call, its result sent back as Ollama's clients send it, an answer."""
    messages = says(f"let me see {CALL}")
    asked = ask(client, "/api/chat", messages=messages, tools=[TOOL])
    (call,) = asked["message"]["tool_calls"]
    assert call["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Oslo", "days": 3}}
    assert asked["message"]["content"].strip() == "let me see" and asked["done_reason"] == "stop"
    messages += [asked["message"], {"role": "tool", "tool_name": "weather", "content": "3 C"}, *says("it is cold")]
    assert ask(client, "/api/chat", messages=messages, tools=[TOOL])["message"]["content"] == "it is cold"


def test_a_streamed_call_comes_in_one_line(client: httpx.Client) -> None:
    found = lines(client, "/api/chat", messages=says(CALL + CALL), tools=[TOOL])
    called = [line["message"]["tool_calls"] for line in found if "tool_calls" in line["message"]]
    assert [call["function"]["index"] for (call,) in called] == [0, 1]
    assert [call["function"]["arguments"] for (call,) in called] == [{"city": "Oslo", "days": 3}] * 2
    assert "".join(line["message"]["content"] for line in found) == ""


def test_a_call_that_is_cut_off_leaks_nowhere(client: httpx.Client) -> None:
    cut = {"messages": says(CALL), "tools": [TOOL], "options": {"num_predict": 40}}
    (*_, last) = found = lines(client, "/api/chat", **cut)
    assert not any("tool_calls" in line["message"] or line["message"]["content"] for line in found)
    whole = ask(client, "/api/chat", **cut)
    assert whole["message"] == {"role": "assistant", "content": ""}
    assert last["done_reason"] == whole["done_reason"] == "length"


def test_options_end_an_answer(client: httpx.Client) -> None:
    cut = ask(client, "/api/chat", messages=says("one two"), options={"num_predict": 3, "num_ctx": 4096})
    assert (cut["message"]["content"], cut["done_reason"]) == ("one", "length")
    stopped = ask(client, "/api/chat", messages=says("one two"), options={"stop": ["two"]})
    assert (stopped["message"]["content"], stopped["done_reason"]) == ("one ", "stop")


def test_log_probabilities(client: httpx.Client) -> None:
    asked = {"messages": says("hello"), "logprobs": True, "top_logprobs": 2}
    whole = ask(client, "/api/chat", **asked)["logprobs"]
    assert [entry["token"] for entry in whole[:5]] == list("hello") and len(whole) == 6
    streamed = [entry for line in lines(client, "/api/chat", **asked) for entry in line.get("logprobs", [])]
    assert streamed == whole and whole[0]["bytes"] == [ord("h")]


def test_options_without_effect_are_named(client: httpx.Client) -> None:
    body = {"messages": says("hi"), "stream": False, "options": {"num_ctx": 4096, "mirostat": 1}, "shift": True}
    answer = client.post("/api/chat", json=body)
    named = set(answer.headers["x-baton-ignored-fields"].split(","))
    assert named == {"options.num_ctx", "options.mirostat", "shift"}


# ---- prompts


def test_a_prompt_is_answered_in_the_template_or_raw(client: httpx.Client) -> None:
    found = lines(client, "/api/generate", prompt="say:hello there", system="be brief")
    assert "".join(line["response"] for line in found) == "hello there"
    assert "context" not in found[-1] and found[-1]["prompt_eval_count"] > len("say:hello there")
    raw = ask(client, "/api/generate", prompt="say:hello", raw=True)
    assert (raw["response"], raw["prompt_eval_count"]) == ("hello", len("say:hello"))


@pytest.mark.parametrize(("keep_alive", "reason"), [(None, "load"), ("5m", "load"), (0, "unload")])
def test_without_a_prompt_the_model_is_there(client: httpx.Client, keep_alive: Any, reason: str) -> None:
    """Open WebUI unloads a model with such a request, and reads one object although it asks for no such thing."""
    for path, body in (("/api/generate", {"prompt": ""}), ("/api/generate", {}), ("/api/chat", {"messages": []})):
        answer = client.post(path, json={"model": "hashlm:latest", "keep_alive": keep_alive, **body})
        assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
        found = answer.json()
        assert (found["done"], found["done_reason"]) == (True, reason)
        assert (found["message"]["content"] if path == "/api/chat" else found["response"]) == ""


# ---- models


def test_open_webui_finds_the_model_and_its_context(client: httpx.Client) -> None:
    """It appends `latest` to names, and looks them up in the list."""
    (model,) = client.get("/api/tags").json()["models"]
    assert model["model"] == model["name"] == "hashlm:latest" and len(model["digest"]) == 64
    datetime.fromisoformat(model["modified_at"])
    (running,) = client.get("/api/ps").json()["models"]
    assert running["name"] == model["name"] and running["context_length"] > 0
    assert datetime.fromisoformat(running["expires_at"]).timestamp() > datetime.now(UTC).timestamp()
    shown = client.post("/api/show", json={"model": "hashlm:latest"}).raise_for_status().json()
    info = shown["model_info"]
    assert info[info["general.architecture"] + ".context_length"] == running["context_length"]
    assert shown["capabilities"] == ["completion", "tools"]
    assert client.post("/api/show", json={"name": "hashlm"}).json()["model_info"] == info
    version = client.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) > (0, 6, 4), "the least version of some editors"


def test_what_needs_a_key_and_what_does_not(router: RouterProcess) -> None:
    for path in ("/api/version", "/openapi.json", "/"):
        assert httpx.get(router.url + path).status_code == httpx.head(router.url + path).status_code == 200
    for path in ("/api/tags", "/api/ps"):
        assert httpx.get(router.url + path).status_code == 401
    for path in ("/api/chat", "/api/generate", "/api/show"):
        answer = httpx.post(router.url + path, json={})
        assert (answer.status_code, answer.json()) == (401, {"error": "the API key is missing or wrong"})


# ---- errors


def test_errors_are_ollama_s(client: httpx.Client) -> None:
    missing = client.post("/api/chat", json={"model": "llama3:8b", "messages": says("hi")})
    assert missing.status_code == 404 and "'llama3:8b'" in missing.json()["error"]
    image = [{"role": "user", "content": "what is it?", "images": ["aGk="]}]
    refused = client.post("/api/chat", json={"messages": image})
    assert refused.status_code == 400 and "reads text only" in refused.json()["error"]
    wrong = client.post("/api/generate", json={"prompt": "hi", "options": {"temperature": "warm"}})
    assert wrong.status_code == 400 and wrong.json()["error"].startswith("options.temperature")
    late = [json.loads(line) for line in client.post("/api/chat", json={"messages": [
        {"role": "user", "content": "late:overloaded"}]}).text.splitlines()]  # fmt: skip
    assert isinstance(late[-1]["error"], str) and "done" not in late[-1]


@pytest.mark.parametrize(
    ("method", "path", "word"),
    [("POST", "/api/embed", "embeddings"), ("POST", "/api/embeddings", "embeddings"), ("POST", "/api/pull", "pulled"),
     ("DELETE", "/api/delete", "deleted"), ("HEAD", "/api/blobs/sha256:1", ""), ("POST", "/api/create", "created")],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(client: httpx.Client, method: str, path: str, word: str) -> None:
    """A 404 would make clients pull the model."""
    answer = client.request(method, path)
    assert answer.status_code == 400 and (method == "HEAD" or word in answer.json()["error"])


def test_an_unknown_path_is_a_404(client: httpx.Client) -> None:
    answer = client.get("/api/nothing")
    assert answer.status_code == 404 and isinstance(answer.json()["error"], str)


def test_streams_have_no_event_ids(client: httpx.Client) -> None:
    answer = client.post(
        "/api/generate", json={"prompt": "say:hi"}, headers={"X-Stream-Ids": "1", "Last-Event-ID": "x"}
    )
    assert answer.status_code == 200 and "id:" not in answer.text
