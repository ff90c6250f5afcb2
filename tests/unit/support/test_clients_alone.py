"""What a foreign program meets when it runs alone: no network, no settings and no files of this user."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.clients import alone as module
from tests.clients.agent_programs import CLAUDE_CODE, CODEX, Agent, said
from tests.clients.alone import Alone, Done, alone, relayed, why_not_alone
from tests.clients.log_server import SAID, logging_server
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.web.answering import answering

needs_root = pytest.mark.skipif(bool(why_not_alone()), reason=f"a network of its own: {why_not_alone()}")


@pytest.fixture
def here() -> Iterator[Alone]:
    with alone() as here:
        yield here


def shell(here: Alone, line: str, **settings: str) -> Done:
    return here.run(["bash", "-c", line], settings, HANG_GUARD_S)


@needs_root
def test_a_program_sees_no_setting_and_is_nobody(here: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "a real one")
    lines = shell(here, "env; id -u; pwd; touch $HOME/x; ls -A", KEY="made-up").printed.splitlines()
    names = {line.partition("=")[0] for line in lines if "=" in line}
    assert names - {"PWD", "SHLVL", "_"} == {"PATH", "LANG", "HOME", "KEY"}
    assert lines[-2:] == [str(module.NOBODY), str(here.work)], "the folder is empty"


@needs_root
def test_its_home_is_gone_afterwards() -> None:
    with alone() as here:
        here.write(".config/deep/file", "x")
        assert shell(here, "echo more >> $HOME/.config/deep/file; cat $HOME/.config/deep/file").printed == "xmore\n"
    assert not here.home.exists()


@needs_root
def test_it_reaches_only_what_listens_inside(here: Alone) -> None:
    with answering(b"hello") as url:
        port = int(url.rpartition(":")[2])
        get = "exec 3<>/dev/tcp/127.0.0.1/{}; printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3"
        outside = shell(here, get.format(port))
        assert outside.status and "hello" not in outside.printed
        assert shell(here, "cat < /dev/tcp/192.0.2.1/80").status
        listener = here.listen()
        inner = listener.getsockname()[1]
        with relayed(listener, "127.0.0.1", port):
            assert shell(here, get.format(inner)).printed.endswith("hello")
        assert shell(here, get.format(inner)).status


@needs_root
def test_a_program_that_hangs_ends_with_its_children(here: Alone) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        here.run(["bash", "-c", "sleep 3000 & echo $! > pid; wait"], {}, 2.0)
    child = int((here.work / "pid").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.wait_procs([psutil.Process(child)], timeout=HANG_GUARD_S)
        assert psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_who_is_not_root_hears_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "why_not_here", str)
    monkeypatch.setattr(module, "ip_tool", lambda: "/sbin/ip")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert why_not_alone() == "only root can"
    monkeypatch.setattr(module, "ip_tool", lambda: None)
    assert "iproute2" in why_not_alone()


def test_an_answer_is_told_only_of_a_program_that_ended_well() -> None:
    assert said(Done(0, " yes\n", "a warning")) == "yes"
    with pytest.raises(AssertionError, match="it ended with 1: no\nlogin"):
        said(Done(1, "no\n", "login"))


# ---- the logging server


def post(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with urllib.request.urlopen(url, json.dumps(body).encode()) as answer:
        lines = answer.read().decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


@pytest.mark.parametrize(
    ("agent", "path", "result"),
    [(CLAUDE_CODE, "/v1/messages?beta=true", "tool_result"), (CODEX, "/v1/responses", "function_call_output")],
)
def test_a_session_gets_a_call_and_then_a_text(agent: Agent, path: str, result: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with logging_server(listener, agent) as log:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert agent.tool in json.dumps(post(url + path, {"input": []}))
        assert SAID in json.dumps(post(url + path, {"input": [{"type": result}]}))
        for more, status in (({"Upgrade": "websocket"}, 426), ({}, 404)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(urllib.request.Request(url + "/v1/responses/x", headers=more))
            assert refused.value.code == status
            refused.value.close()
    assert [kept.method for kept in log.requests] == ["POST", "POST", "GET", "GET"]
    assert json.loads(log.requests[0].body) == {"input": []} and log.requests[0].path == path
