"""Operators: named keys with rights at /admin, and a line in the log for each call."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Message

from deploy import cli
from deploy.router_http import seers_key
from router.api.admin.admin import AdminHandlers
from router.api.endpoint import EndpointRules
from router.api.site.routes import admin_routes, build_routes
from router.http.connection import Connection
from router.tenants import book
from router.tenants.book import KeysFollower, Tenants
from router.tenants.keys_file import ADMIN_FLAG, hash_of, parse_admins, read_admins
from shared.core.errors import ConfigError
from shared.observe.log import Logger
from shared.observe.metrics import RequestMetrics
from tests.support.clusters.key_folders import write_key
from tests.unit.router.tenants.test_tenants import TWO

KEYS = {"watch": "see", "shift": "drain", "chief": "change"}
ADMINS = "".join(f'[admins.{name}]\nkeys = ["{hash_of(name)}"]\nrights = ["{right}"]\n' for name, right in KEYS.items())
CALLS = {
    ("GET", "/admin/status"): "see",
    ("GET", "/admin/adapters"): "see",
    ("POST", "/admin/drain"): "drain",
    ("POST", "/admin/role"): "change",
    ("POST", "/admin/abort"): "change",
    ("POST", "/admin/adapters"): "change",
    ("DELETE", "/admin/adapters/sql"): "change",
}
ADDRESS = "192.0.2.7"


async def taken(connection: Connection) -> None:
    connection.subject = {"node": "decode-1"}
    await connection.answer(202, b"{}")


class Site:
    def __init__(self, operators: Tenants) -> None:
        self.told = io.StringIO()
        log = Logger("r", self.told, form="json")
        rules = EndpointRules(log, RequestMetrics(CollectorRegistry()), operators, 1, 1.0)
        admin = Mock(spec=AdminHandlers, status=taken, drain=taken, role=taken, abort=taken)
        admin.adapters = Mock(show_or_load=taken, remove_adapter=taken)
        routes = admin_routes(rules, admin)
        assert {route.path for route in routes} == {path.replace("/sql", "/{name:path}") for _, path in CALLS}
        self.app = build_routes(rules, Mock(generation=Mock(by_path=dict), admin=admin), operators)

    def ask(self, method: str, path: str, key: str = "", **headers: str) -> tuple[int, str]:
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b""}

        async def send(message: Message) -> None:
            sent.append(message)

        headers |= {"authorization": f"Bearer {key}"} if key else {}
        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": method, "path": path, "headers": raw, "root_path": "", "query_string": b""}
        asyncio.run(self.app({**scope, "client": (ADDRESS, 9)}, receive, send))
        return sent[0]["status"], sent[1]["body"].decode()

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.told.getvalue().splitlines()]


def test_each_key_may_do_what_its_rights_say() -> None:
    site = Site(Tenants(parse_admins(ADMINS)))
    for name, own in KEYS.items():
        for (method, path), needed in CALLS.items():
            status, body = site.ask(method, path, name)
            if needed in ("see", own):
                assert status == 202, (name, method, path)
            else:
                assert status == 403 and f"{name!r} has the rights see" in body, (name, method, path)
                assert f"needs the right {needed}" in body and "missing_right" in body


@pytest.mark.parametrize("key", ["", "nobody", hash_of("chief"), hash_of("chief").removeprefix("sha256:")])
def test_what_is_no_operator_s_key_opens_nothing(key: str) -> None:
    site = Site(Tenants(parse_admins(ADMINS)))
    assert {site.ask(*call, key)[0] for call in CALLS} == {401}


def test_one_bare_key_has_all_rights_as_before(tmp_path: Path) -> None:
    write_key(tmp_path / "admin.key", "op\n")
    site = Site(Tenants(read_admins(str(tmp_path / "admin.key"))))
    assert {site.ask(*call, "op")[0] for call in CALLS} == {202}
    assert {site.ask(*call, "other")[0] for call in CALLS} == {401}
    assert {line["key"] for line in site.lines()} == {"admin", "none"}


def test_each_change_has_a_line_that_says_who_and_from_where() -> None:
    site = Site(Tenants(parse_admins(ADMINS)))
    for _ in range(3):
        site.ask("POST", "/admin/drain", "shift", x_request_id="r-1", x_forwarded_for="10.0.0.9")
    assert len(site.lines()) == 3
    assert site.lines()[0] | {"time": ""} == {
        "time": "",
        "level": "info",
        "part": "r",
        "message": "admin call",
        "key": "shift",
        "address": ADDRESS,
        "call": "POST /admin/drain",
        "status": 202,
        "forwarded_for": "10.0.0.9",
        "request": "r-1",
        "node": "decode-1",
    }


def test_questions_and_refusals_fill_no_log() -> None:
    site = Site(Tenants(parse_admins(ADMINS)))
    for number in range(100):
        site.ask("GET", "/admin/status", "watch")
        site.ask("POST", "/admin/role", "watch")
        site.ask("POST", "/admin/role", f"guess-{number}")
        site.ask("POST", "/admin/status")
        site.ask("OPTIONS", "/admin/drain")
        site.ask("DELETE", f"/admin/adapters/{number}", "watch")
    told = [(line["key"], line["call"], line["status"]) for line in site.lines()]
    assert told.count(("watch", "GET /admin/status", 202)) == 1
    assert told.count(("watch", "POST /admin/role", 403)) == 1
    assert told.count(("watch", "DELETE /admin/adapters/0", 403)) == 1
    assert told.count(("none", "OPTIONS /admin/drain", 200)) == 1
    refused = [line for line in told if line[0] == "none" and line[2] != 200]
    assert set(refused) == {("none", "POST /admin/role", 401), ("none", "POST /admin/status", 405)}
    assert len(refused) == 20 and len(told) == 24
    assert "guess" not in site.told.getvalue()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (ADMINS.replace('"see"', '"all"'), "Invalid enum value 'all'"),
        (ADMINS.replace('["see"]', "[]"), "length >= 1"),
        (ADMINS.replace("rights", "right"), "unknown field `right`"),
        (ADMINS.replace(hash_of("watch"), hash_of("chief")), "admin chief has a key that is listed twice"),
        ("[admins]\n", "no admin in it"),
        (TWO, "unknown field"),
        ("", "empty"),
        ("two\nlines", "neither one key nor TOML"),
    ],
)
def test_a_file_of_operators_that_is_wrong_is_refused(text: str, why: str, tmp_path: Path) -> None:
    write_key(tmp_path / "admins.toml", text)
    with pytest.raises(ConfigError, match=f"--admin-key-file .*{why}"):
        read_admins(str(tmp_path / "admins.toml"))


def test_operators_keys_change_without_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "FOLLOW_S", 0.0)
    file, told = tmp_path / "admins.toml", io.StringIO()
    write_key(file, ADMINS)
    operators = Tenants(read_admins(str(file)))
    follower = KeysFollower(str(file), operators, Logger("r", told), ADMIN_FLAG)
    assert (follower.look() or ((), ""))[1] == ""
    write_key(file, ADMINS.replace("admins.chief", "admins.boss"))
    follower.take_keys(*(follower.look() or pytest.fail("the file changed")))
    found = operators.find(["chief"])
    assert found is not None and found.name == "boss" and found.rights == ("see", "change")
    write_key(file, TWO)
    follower.take_keys(*(follower.look() or pytest.fail("the file changed")))
    assert operators.find(["chief"]) is found and f'keys stay as they were why="{ADMIN_FLAG}' in told.getvalue()


def test_a_word_in_the_table_s_place_is_nobody_s_key(tmp_path: Path) -> None:
    file, told = tmp_path / "admins.toml", io.StringIO()
    write_key(file, "garbage")
    operators = Tenants(parse_admins(ADMINS))
    follower = KeysFollower(str(file), operators, Logger("r", told), ADMIN_FLAG)
    follower.take_keys(*(follower.look() or pytest.fail("the file changed")))
    assert operators.find(["garbage"]) is None and operators.find(["chief"]) is not None
    assert "one bare key now" in told.getvalue()


def test_the_command_makes_a_key_with_rights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "admins.toml"
    for words in (("chief", "--rights", "drain", "change"), ("watch",), ("watch",)):
        assert cli.main(["keys", "admin", str(file), *words]) == 0
    chief, watch, second = (
        line.rpartition(" ")[2] for line in capsys.readouterr().out.splitlines() if "stored nowhere" in line
    )
    operators = Tenants(read_admins(str(file)))
    rights = {key: getattr(operators.find([key]), "rights", None) for key in (chief, watch, second)}
    assert rights == {chief: ("see", "drain", "change"), watch: ("see",), second: ("see",)}
    assert file.stat().st_mode & 0o077 == 0 and chief not in file.read_text()
    before = file.read_text()
    assert cli.main(["keys", "admin", str(file), "watch", "--rights", "change"]) != 0, "it would not take effect"
    assert file.read_text() == before and "by hand" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["admin", "tenant"])
def test_a_file_that_can_t_be_used_is_named(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half = tmp_path / "half.toml"
    write_key(half, "[admins.x")
    for file, why in ((half, "neither one key nor TOML"), (tmp_path / "none" / "keys.toml", "No such file")):
        assert cli.main(["keys", kind, str(file), "alice"]) == 2
        assert f"{file}: {why}" in capsys.readouterr().err


def test_a_command_takes_no_table_for_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    admins, tenants = tmp_path / "admins.toml", tmp_path / "tenants.toml"
    write_key(admins, ADMINS)
    write_key(tenants, TWO)
    for words in (["--admin-key-file", str(admins), "status"], ["status", "--admin-key-file", str(admins)]):
        assert cli.main(["admin", *words]) == 2
        assert "needs a file with one key" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--admin-key-file .*needs a file with one key"):
        seers_key(str(tenants), str(admins))
