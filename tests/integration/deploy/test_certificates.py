"""Certificates over HTTP: a real router, asked by the openai SDK, with nodes that only pretend to compute."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deploy import cli
from deploy.tools.certify.shown_files import read_shown
from router.certify.record import AnswerRecord
from router.certify.signing import key_id, make_secret, public_pem, read_public, read_record, verified
from tests.support.clusters.router_fake_node import FINGERPRINT, FakeNode, char_ids
from tests.support.clusters.router_process import RouterProcess, eventually
from tests.support.machine.patience import HANG_GUARD_S

MODEL = "hashlm"
ASKED = {"certificate": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    (folder / "public.pem").write_text(public_pem(make_secret(folder / "secret.pem")))
    return folder / "public.pem"


@pytest.fixture(scope="module")
def router(public: Path) -> Iterator[RouterProcess]:
    process = RouterProcess("--certificate-key", str(public.with_name("secret.pem")), "--local-prefill-tokens", "0")
    decode = FakeNode("decode", process.nodes, "d0").start()
    prefill = FakeNode("prefill", process.nodes, "p0", peer=decode).start()
    yield process
    for node in (prefill, decode):
        node.stop()
    assert process.stop() == 0


@pytest.fixture
def client(router: RouterProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def records_in(tmp_path: Path, text: str, public: Path) -> list[AnswerRecord]:
    """Of a saved answer, whose token ids must be the certified ones."""
    file = tmp_path / "answer"
    file.write_text(text)
    found = []
    for shown in read_shown(file):
        record = verified(shown.record, read_public([public]))
        assert shown.check_shown(record)[:2] == ["prompt", "tokens"]
        found.append(record)
    return found


def test_each_choice_of_the_sdk_has_a_certificate(client: openai.OpenAI, tmp_path: Path, public: Path) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["say:ab", "say:cd"], n=2, seed=-3, temperature=0.5, stop=["zz"], extra_body=ASKED
    )
    records = records_in(tmp_path, answer.model_dump_json(), public)
    assert [(one.choice, one.sequence, one.finish_reason) for one in records] == [
        (0, 0, "stop"), (1, 1, "stop"), (2, 0, "stop"), (3, 1, "stop"),
    ]  # fmt: skip
    assert [one.tokens.count for one in records] == [3, 4, 3, 4]
    first = records[0]
    assert (first.answer, first.model, first.adapter, first.seed) == (answer.id, MODEL, "", (1 << 64) - 3)
    assert first.sampling["temperature"] == 0.5 and first.sampling["max_tokens"] == 16 and first.stop is not None
    (node,) = first.nodes
    assert (node.numerics, node.weights, node.pages) == (1, FINGERPRINT.weights, FINGERPRINT.page_layout)
    assert len({one.prompt.digest for one in records}) == 4  # each has a salt of its own
    assert cli.main(["verify", str(tmp_path / "answer"), "--key", str(public)]) == 0


def test_the_header_asks_for_the_same(client: openai.OpenAI, tmp_path: Path, public: Path) -> None:
    """A chat without a seed: the record has the one that the router drew."""
    messages: Any = [{"role": "user", "content": "say:hello"}]
    header, by_field = (
        client.chat.completions.create(model=MODEL, messages=messages, **asked)  # type: ignore[call-overload]
        for asked in (
            {"extra_headers": {"X-Certificate": "yes"}, "extra_body": {"return_token_ids": True}},
            {"extra_body": ASKED},
        )
    )
    plain = client.chat.completions.create(model=MODEL, messages=messages)
    assert "certificate" not in plain.choices[0].model_dump()
    ones = [records_in(tmp_path, one.model_dump_json(), public)[0] for one in (header, by_field)]
    assert ones[0].seed != ones[1].seed and min(ones[0].seed, ones[1].seed) > 0
    assert all(one.prompt.count == len(char_ids("user: say:hello assistant: ")) for one in ones)
    assert all(one.stop is None and one.tokens.count == 6 for one in ones)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_s_last_chunks_have_them(router: RouterProcess, tmp_path: Path, public: Path, path: str) -> None:
    asked = {"messages": [{"role": "user", "content": "say:hello"}], "prompt": "say:hello"}
    name = "prompt" if path == "/v1/completions" else "messages"
    body = {"model": MODEL, "stream": True, "n": 2, name: asked[name], **ASKED}
    answer = httpx.post(router.url + path, json=body, headers={"X-Stream-Ids": "1"}, timeout=HANG_GUARD_S)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    ends = [choice for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert all("certificate" in choice for choice in ends) and len(ends) == 2
    assert answer.text.count('"certificate"') == 2
    records = records_in(tmp_path, answer.text, public)
    assert sorted(one.choice for one in records) == [0, 1] and {one.answer for one in records} == {events[0]["id"]}


def test_a_resumed_stream_certifies_all_of_it(router: RouterProcess, tmp_path: Path, public: Path) -> None:
    """The client lost all after its first tokens. Its own tokens and the rest are what the certificate says."""
    body = {"model": MODEL, "stream": True, "prompt": "x", "max_tokens": 30, **ASKED}
    url = router.url + "/v1/completions"
    whole = httpx.post(url, json=body, headers={"X-Stream-Ids": "1"}, timeout=HANG_GUARD_S).text
    events = whole.strip().split("\n\n")
    token = events[0].split("\n")[0].removeprefix("id: ").partition("/")[0]
    seen = events[: len(events) // 2]
    last = seen[-1].split("\n")[0].removeprefix("id: ").rpartition("/")[2]
    rest = httpx.post(url, json=body, headers={"Last-Event-ID": f"{token}/{last}"}, timeout=HANG_GUARD_S).text
    (record,) = records_in(tmp_path, "\n\n".join(seen) + "\n\n" + rest, public)
    assert record.tokens.count == 30


def test_a_structured_answer_brings_its_grammar(client: openai.OpenAI, tmp_path: Path, public: Path) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="say:ab", extra_body={**ASKED, "structured_outputs": {"regex": "[a-z]+"}}
    )
    (record,) = records_in(tmp_path, answer.model_dump_json(), public)
    (shown,) = read_shown(tmp_path / "answer")
    assert shown.sampling["grammar"] not in ("", record.sampling["grammar"])
    assert record.sampling_params(shown.sampling).grammar == shown.sampling["grammar"]


def test_other_endpoints_say_where_certificates_are(router: RouterProcess) -> None:
    body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "say:hello"}]}
    answer = httpx.post(router.url + "/v1/messages", json=body, headers={"X-Certificate": "1"}, timeout=HANG_GUARD_S)
    assert answer.status_code == 400 and "/v1/chat/completions" in answer.text


def test_a_router_without_a_key_says_what_to_do() -> None:
    process = RouterProcess()
    try:
        for more, headers in ((ASKED, {}), ({}, {"X-Certificate": "1"})):
            body = {"model": MODEL, "prompt": "x", **more}
            answer = httpx.post(process.url + "/v1/completions", json=body, headers=headers, timeout=HANG_GUARD_S)
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == "certificate"
            assert "--certificate-key FILE" in error["message"] and "baton keys certificate" in error["message"]
    finally:
        assert process.stop() == 0


def test_a_running_router_takes_a_new_key(
    router: RouterProcess, client: openai.OpenAI, tmp_path: Path, public: Path
) -> None:
    """Answers of before are certified by the old public key. It is the last test: others know only that key."""
    secret, fresh = public.with_name("secret.pem"), tmp_path / "next.pem"

    def asked() -> tuple[str, str]:
        """An answer as a client saves it, and the id of the key that signed it."""
        answer = client.completions.create(model=MODEL, prompt="say:ab", extra_body=ASKED)
        return answer.model_dump_json(), read_record(answer.choices[0].certificate["record"])[0].kid  # type: ignore

    (tmp_path / "old").write_text(asked()[0])
    made = make_secret(fresh)
    fresh.replace(secret)
    eventually(lambda: asked()[1] == key_id(made))
    (tmp_path / "new").write_text(asked()[0])
    (tmp_path / "both.pem").write_text(public.read_text() + public_pem(made))
    names = [str(tmp_path / name) for name in ("old", "new")]
    assert cli.main(["verify", *names, "--key", str(tmp_path / "both.pem")]) == 0
    assert [cli.main(["verify", name, "--key", str(public)]) for name in names] == [0, 1]
    assert any("the key of certificates was read again" in line for line in router.lines)
