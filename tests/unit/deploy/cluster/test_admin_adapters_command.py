"""`baton admin adapters` against a client that answers what the test says."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from deploy.cluster import admin, admin_adapters
from deploy.cluster.admin_adapters import run_adapters


class Answers:
    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[str, str, Any]] = []

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        self.calls.append((method, path, body))
        return self.answers.pop(0)


def row(node: str, state: str, **more: object) -> dict[str, Any]:
    return {"node": node, "state": state, "digest": "", "why": "", "requests": 0} | more


def told(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"number": 7, "nodes": list(rows)}


def shown(**states: str) -> dict[str, Any]:
    """What GET answers: each node's order of number 7, and an older one."""
    nodes = [
        {
            "node": node,
            "adapters": {},
            "orders": [row(node, "refused", number=6), row(node, state, digest="abc", number=7)],
        }
        for node, state in states.items()
    ]
    return {"adapters": {}, "nodes": nodes}


def run(client: Answers, *words: str) -> int:
    parser = argparse.ArgumentParser()
    admin.add_arguments(parser)
    return run_adapters(parser.parse_args(["adapters", *words]), client)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_adapters, "POLL_S", 0.0)


def test_load_waits_for_every_node(capsys: pytest.CaptureFixture[str]) -> None:
    client = Answers(
        told(row("p0", "loaded", digest="abc"), row("d0", "loading")), shown(d0="loading"), shown(d0="loaded")
    )
    assert run(client, "load", "sql", "--path", "team/sql") == 0
    assert client.calls[0] == ("POST", "/admin/adapters", {"name": "sql", "path": "team/sql"})
    assert [call[0] for call in client.calls] == ["POST", "GET", "GET"]
    assert capsys.readouterr().out == "p0: loaded abc\nd0: loaded abc\n"


def test_load_fails_if_one_node_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    client = Answers(told(row("p0", "loaded"), row("d0", "refused", why="no such folder")))
    assert run(client, "load", "sql") == 1
    assert client.calls == [("POST", "/admin/adapters", {"name": "sql"})]
    assert "d0: refused: no such folder" in capsys.readouterr().out


def test_load_fails_if_nodes_have_other_weights(capsys: pytest.CaptureFixture[str]) -> None:
    client = Answers(told(row("p0", "loaded", digest="x"), row("d0", "loaded", digest="y")))
    assert run(client, "load", "sql") == 1
    assert "other weights for sql" in capsys.readouterr().err


def test_remove_waits_for_streams_and_lost_nodes_end_it() -> None:
    client = Answers(
        told(row("p0", "removed"), row("d0", "leaving", requests=2), row("d1", "leaving")),
        shown(p0="removed", d0="leaving", d1="leaving"),
        shown(p0="removed", d0="removed"),
    )
    assert run(client, "remove", "a b/c", "--move-after", "5") == 1, "d1 is gone"
    assert client.calls[0] == ("DELETE", "/admin/adapters/a%20b/c", {"move_after_s": 5.0})
    assert len(client.calls) == 3


def test_remove_gives_up_after_the_timeout(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Answers(told(row("d0", "leaving", requests=2))), "remove", "sql", "--timeout", "0") == 1
    assert capsys.readouterr().out == "d0: leaving: 2 requests still use it\n"


def test_list_says_who_has_what(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [
        {"node": "p0", "adapters": {"sql": "x"}, "orders": [row("p0", "loaded", name="sql")]},
        {"node": "d0", "adapters": {"sql": "y"}, "orders": []},
        {"node": "d1", "adapters": {}, "orders": [row("d1", "refused", name="sql", why="no such folder")]},
    ]
    assert run(Answers({"adapters": {"sql": "x"}, "nodes": nodes}), "list") == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "sql  x  on p0",
        "d0 has other weights for sql: it serves no requests for it",
        "d1: sql refused: no such folder",
    ]
    assert run(Answers({"adapters": {}, "nodes": []}), "list") == 0
    assert capsys.readouterr().out == "no adapters\n"
