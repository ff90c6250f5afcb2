"""`baton ask` and `baton chat`: what is sent, what appears, and what is said when there is no answer."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deploy import cli
from deploy.tools import ask
from shared.config.flags import given_values
from shared.config.load import load
from shared.config.processes import ClusterConfig
from shared.core import launcher
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.machine.ports import free_port
from tests.support.web.serving import QuietHandler, serving


class Server:
    """Speaks as much of the chat API as these commands use. `bodies`: what it got."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.models, self.status, self.pieces, self.key = ["first", "second"], 200, ["Par", "is."], ""
        self.ends_well = self.lists = True
        server = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                is_known = server.key in self.headers.get("authorization", "")
                models = [{"id": one} for one in server.models]
                listed = json.dumps({"data": models}) if server.lists else REFUSAL
                self.say((200 if server.lists else 400) if is_known else 401, listed.encode())

            def do_POST(self) -> None:
                server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                told = [{"choices": [{"delta": {"content": piece}}]} for piece in server.pieces]
                whole = [{"choices": [{"delta": {}, "finish_reason": "stop"}]}] if server.ends_well else []
                lines = [f"data: {json.dumps(one)}\n\n" for one in [{"choices": [{"delta": {}}]}, *told, *whole]]
                answer = "".join([*lines, "data: [DONE]\n\n"]) if server.status == 200 else REFUSAL
                self.say(server.status, answer.encode())

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


REFUSAL = json.dumps({"error": {"message": "the prompt is too long"}})


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    with serving(made.http):
        yield made


def test_a_question_is_answered_by_the_server_s_first_model(server: Server, capsys) -> None:
    assert cli.main(["ask", "--url", server.url, "What", "is it?"]) == 0
    assert capsys.readouterr().out == "Paris.\n"
    assert server.bodies == [
        {"model": "first", "messages": [{"role": "user", "content": "What is it?"}], "stream": True}
    ]


def test_flags_and_the_standard_input_are_sent_along(server: Server, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a + b\n"))
    words = ["--model", "second", "--system", "Be brief.", "--max-tokens", "5", "--temperature", "0.0"]
    assert cli.main(["ask", "--url", server.url, *words, "Explain:", "-"]) == 0
    (body,) = server.bodies
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body["messages"][1]["content"] == "Explain: \n\na + b"
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("second", 5, 0.0)


def test_a_conversation_keeps_what_was_said(server: Server, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    assert cli.main(["chat", "--url", server.url]) == 0
    assert capsys.readouterr().out == "Paris.\nParis.\n"
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["one", "Paris.", "two"]


def test_ctrl_c_ends_an_answer_and_not_the_conversation(server: Server, monkeypatch, capsys) -> None:
    """The half that was read stays in the conversation."""
    say, stopped = ask.ChatSession.say, []

    def interrupted(self: ask.ChatSession, text: str) -> Iterator[str]:
        for piece in say(self, text):
            yield piece
            if not stopped:
                stopped.append(piece)
                raise KeyboardInterrupt

    monkeypatch.setattr(ask.ChatSession, "say", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert cli.main(["chat", "--url", server.url]) == 0
    assert capsys.readouterr().out == "Par\nParis.\n"
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["one", "Par", "two"]


@pytest.mark.parametrize(
    ("change", "words", "told"),
    [
        ({"status": 400}, [], "the server answered 400: the prompt is too long"),
        ({"models": []}, [], "has no model"),
        ({"lists": False}, [], "answered 400: the prompt is too long"),
        ({}, ["--model", "third"], "no model 'third'; it has first, second"),
        ({"key": "Bearer secret"}, [], "give --api-key-file"),
    ],
)
def test_a_refusal_says_what_to_do(server: Server, capsys, change: dict[str, Any], words: list[str], told: str) -> None:
    vars(server).update(change)
    assert cli.main(["ask", "--url", server.url, *words, "Hi"]) == 2
    assert told in capsys.readouterr().err


def test_an_error_in_mid_answer_is_told_below_its_beginning(server: Server, capsys, monkeypatch) -> None:
    monkeypatch.setattr(json, "loads", lambda text, loads=json.loads: {"error": {"message": "gone"}} if b"is." in text
                        else loads(text))  # fmt: skip
    assert cli.main(["ask", "--url", server.url, "Hi"]) == 2
    out, err = capsys.readouterr()
    assert out == "Par\n" and "the answer broke off: gone" in err


def test_a_cut_answer_is_not_taken_for_a_whole_one(server: Server, capsys) -> None:
    server.ends_well = False
    assert cli.main(["ask", "--url", server.url, "Hi"]) == 2
    out, err = capsys.readouterr()
    assert out == "Paris.\n" and "the answer broke off: the connection ended" in err


def test_a_server_that_goes_is_told(server: Server, capsys, monkeypatch) -> None:
    monkeypatch.setattr(server.http.RequestHandlerClass, "do_POST", lambda handler: handler.connection.close())
    assert cli.main(["ask", "--url", server.url, "Hi"]) == 2
    assert "the server is gone" in capsys.readouterr().err


def test_a_refusal_does_not_end_a_conversation(server: Server, capsys, monkeypatch) -> None:
    """The refused line is forgotten, what was said before is not."""
    lines = iter(["one", "two", "three"])

    def read(*_: object) -> str:
        server.status = 400 if len(server.bodies) == 1 else 200
        if (line := next(lines, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", read)
    assert cli.main(["chat", "--url", server.url]) == 0
    out, err = capsys.readouterr()
    assert out.split() == ["Paris.", "Paris."] and "the prompt is too long" in err
    assert [message["content"] for message in server.bodies[2]["messages"]] == ["one", "Paris.", "three"]


def test_a_server_that_is_slow_is_not_replaced(server: Server, capsys, monkeypatch) -> None:
    waits = threading.Event()
    monkeypatch.setattr(server.http.RequestHandlerClass, "do_GET", lambda handler: waits.wait(HANG_GUARD_S))
    monkeypatch.setattr(ask, "DEFAULT_URL", server.url)
    monkeypatch.setattr(ask, "FIRST_ANSWER_S", 0.2)
    try:
        assert cli.main(["ask", "Hi"]) == 2
    finally:
        waits.set()
    assert "is a server running there?" in capsys.readouterr().err


def test_a_named_server_that_is_not_there_is_not_replaced(capsys) -> None:
    assert cli.main(["ask", "--url", f"http://127.0.0.1:{free_port()}", "Hi"]) == 2
    assert "is a server running there?" in capsys.readouterr().err


def test_without_a_server_one_is_started_for_this_and_ended(server: Server, capsys, monkeypatch) -> None:
    life: list[object] = []

    @contextlib.contextmanager
    def own_cluster(flags: tuple[str, ...], log: Path, timeout_s: float) -> Iterator[str]:
        load(ClusterConfig, given_values(cli.make_parser().parse_args(["up", *flags])))  # `baton up` takes them
        log.write_text("loading\nhalf a li")
        life.append((flags, log))
        yield server.url
        life.append("ended")

    monkeypatch.setattr(ask, "DEFAULT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr("deploy.cluster.own_cluster.own_cluster", own_cluster)
    assert cli.main(["ask", "--model", "mine", "Hi"]) == 0
    (flags, log), end = life
    assert flags[:2] == ("--model", "mine") and end == "ended" and not log.parent.exists()
    assert "starting mine here, just for this" in capsys.readouterr().err
    assert server.bodies[0]["model"] == "first"  # our own cluster's only one, whatever its name


def test_a_long_start_is_told(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(ask, "SHOWN_EVERY_S", 0.01)
    log, waited = tmp_path / "up.log", threading.Event()
    with ask.shown_start(log):
        waited.wait(0.1)
        log.write_text("first\nkernel 3 of 9\nhalf")
        waited.wait(0.2)
    lines = set(capsys.readouterr().err.split("\n"))
    assert {"  ...", "  kernel 3 of 9"} <= lines and "  half" not in lines


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([""], "the question is empty"),
        (["-"], "the question is empty"),
        (["hi", "http://127.0.0.1:1"], "a server is named by --url http://127.0.0.1:1"),
    ],
)
def test_what_is_no_question_is_not_sent(capsys, monkeypatch, words: list[str], told: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert cli.main(["ask", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_reader_that_stops_ends_the_command_quietly(server: Server) -> None:
    """As in `baton ask ... | head -c 1`."""
    server.pieces = ["x" * 70_000] * 20  # more than a pipe holds
    command = [*launcher.command("deploy.cli"), "ask", "--url", server.url, "hi"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait(HANG_GUARD_S) == 0
