"""`baton prove` against servers that answer as told: equal ones, one that forgets, one that flips a token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

from deploy import cli
from deploy.tools.prove import client as prove_client
from deploy.tools.prove.cases import CASES
from deploy.tools.prove.cells import CELLS, chosen_cells
from deploy.tools.prove.compare import AnswerChoice, differences
from shared.core.errors import ConfigError
from tests.support.web.serving import QuietHandler, serving


class Server(ThreadingHTTPServer):
    """Token i of an answer is i; `flip_after` requests, token 5 of every answer to the long prompt is 99."""

    daemon_threads = True
    flip_after = 1_000_000
    num_asked = 0
    is_something_else = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        self.num_asked += 1
        ids = list(range(body["max_tokens"]))
        if self.num_asked > self.flip_after and body["prompt"] == CASES[7].prompt:
            ids[5] = 99
        tops = [{"a": -0.1, "b": -0.1004}] * len(ids)
        choices = [{"index": i, "token_ids": ids, "logprobs": {"top_logprobs": tops}} for i in range(body.get("n", 1))]
        usage = {"prompt_tokens_details": {"cached_tokens": 3}}
        return {"choices": choices[::-1], "usage": usage}


class Handler(QuietHandler):
    server: Server

    def do_GET(self) -> None:
        if self.server.is_something_else:
            self.say(200, b"<html>hello</html>")
        elif self.path == "/metrics":
            self.say(200, b'baton_handoffs_total{node="d"} 4.0\nother 7\n')
        else:
            self.say(200, json.dumps({"data": [{"id": "stub"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.say(200, json.dumps(self.server.answer(body)).encode())


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(prove_client, "HEARTBEAT_S", 0.0)
    server = Server(("127.0.0.1", 0), Handler)
    with serving(server):
        yield server


def test_equal_answers(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prove", server.url, server.url, "--max-tokens", "8"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("11/11  11/11  11/11") == 2 and "All tokens are equal in 6 runs" in printed


def test_the_first_difference_is_named(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.flip_after = len(CASES)
    assert cli.main(["prove", server.url, server.url, "--max-tokens", "8"]) == 1
    printed = capsys.readouterr().out
    assert "11/11  10/11  10/11" in printed and "10/11  10/11  10/11" in printed
    assert "5 answers differ" in printed and "again, request 'long, greedy', answer 0, token 5" in printed
    assert "ids [99, 6, 7] instead of [5, 6, 7]" in printed and "0.0004 apart in logprob (a near tie)" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["http://127.0.0.1:9"], "no answer"),
        (["ftp://x"], "not a server's address"),
        (["--cells", "moon"], "there is no moon"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["http://127.0.0.1:9", "--api-key-file", "/nowhere/key"], "--api-key-file"),
        (["http://127.0.0.1:9", "--layers"], "--layers"),
        (["--dtype", "float16"], "only for a running server"),
    ],
)
def test_what_can_not_be_proved(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prove", *words]) == 2
    assert message in capsys.readouterr().err


def test_something_else_answers(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.is_something_else = True
    assert cli.main(["prove", server.url]) == 2
    assert "names no model" in capsys.readouterr().err
    assert cli.main(["prove", server.url, server.url]) == 2
    assert "is it a router?" in capsys.readouterr().err
    assert cli.main(["admin", "--url", server.url, "status"]) == 2
    assert "is it a router?" in capsys.readouterr().err


def test_two_tokens_of_equal_text_have_no_margin() -> None:
    assert prove_client.margin({"a": -0.5, "b": -1.0}) == 0.5
    assert prove_client.margin({"a": -0.5}) is None
    wanted = [(AnswerChoice((3, 4), (5.0, None)),)]
    (one,) = differences(["a"], wanted, [(AnswerChoice((3, 9)),)])
    assert one.margin is None and "tie" not in str(one)


def test_the_reference_is_always_there() -> None:
    assert [cell.name for cell in chosen_cells("zmq")] == [CELLS[0].name, "zmq"]
    assert chosen_cells("all") == CELLS
    with pytest.raises(ConfigError):
        chosen_cells("zmq,none")
