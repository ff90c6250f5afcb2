"""The router's URL: read in one way, taken by every command as a word or with --url, and missed with one sentence."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import cli
from deploy.router_url import all_of, parse_url, the_only
from deploy.tools.plan import profile as profiles
from shared.core.errors import ConfigError
from tests.support.web.answering import answering
from tests.support.worlds import plan_cases

NOBODY = "http://127.0.0.1:9"
URL = "http://127.0.0.1:8001"
# the words before the URL, as each command needs them
COMMANDS = {
    "admin": ["admin", "status"],
    "admin drain": ["admin", "drain", "decode-0"],
    "admin restart": ["admin", "restart", "--all"],
    "admin abort": ["admin", "abort", "cmpl-1"],
    "admin role": ["admin", "role", "decode-0", "prefill"],
    "doctor": ["doctor", "--interval", "0.1"],
    "load": ["load", "--requests", "1"],
    "prove": ["prove"],
    "plan find": ["plan", "find", "--profile", "PROFILE"],
    "generate": ["generate", "FILE"],
}
NAMES = pytest.mark.parametrize("name", COMMANDS)


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What some commands read before they ask."""
    monkeypatch.chdir(tmp_path)
    profiles.save(plan_cases.profile(), Path("PROFILE"))
    Path("FILE").write_text('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n')


@pytest.mark.parametrize(
    ("text", "shown", "prefix"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000", ""),
        ("localhost:9", "http://localhost:9", ""),
        ("https://api.example.org/v1/", "https://api.example.org:443", ""),
        ("http://h/openai/v1", "http://h:80/openai", "/openai"),
        ("http://[::1]:8000", "http://[::1]:8000", ""),
    ],
)
def test_addresses(text: str, shown: str, prefix: str) -> None:
    url = parse_url(text)
    assert (str(url), url.prefix) == (shown, prefix)


@pytest.mark.parametrize("text", ["", "x", "ftp://x", "http://", "http://h:x", "http://h:99999", "http://[x", "h:"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="--url: .* is not a server's address"):
        parse_url(text)


def test_one_router_may_be_named_twice_and_two_routers_may_not() -> None:
    assert the_only(None, None) is None
    assert the_only("h:8000/v1/", None, "http://h:8000") == parse_url("h:8000")
    with pytest.raises(ConfigError, match="the URL is given twice, as http://h:1 and as http://h:2"):
        the_only("h:1", "h:2")
    assert all_of([], ["h:1", "h:2"]) == all_of(["h:1", "h:2"], []) == all_of(["h:1", "h:2"], ["h:1", "h:2"])
    with pytest.raises(ConfigError, match="twice"):
        all_of(["h:1", "h:2"], ["h:1"])


@NAMES
def test_every_command_refuses_two_routers_and_what_is_no_url(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*COMMANDS[name], URL, "--url", NOBODY]) == 2
    assert "the URL is given twice" in capsys.readouterr().err
    for given in (["ftp://h:1"], ["--url", "ftp://h:1"]):
        assert cli.main([*COMMANDS[name], *given]) == 2
        assert "'ftp://h:1' is not a server's address" in capsys.readouterr().err


@NAMES
@pytest.mark.parametrize("given", [[NOBODY], ["--url", NOBODY], [NOBODY, "--url", "127.0.0.1:9"]])
def test_every_command_says_alike_that_nobody_answers(
    name: str, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The doctor puts it among its findings, for a machine without a router has other things to look at."""
    assert cli.main([*COMMANDS[name], *given]) == (1 if name == "doctor" else 2)
    said = capsys.readouterr()
    assert f"no answer from {NOBODY}: " in said.err + said.out
    assert "is a server running there?" in said.err + said.out


def test_admin_takes_the_flag_ahead_of_the_action_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["admin", "--url", NOBODY, "status"]) == 2
    assert f"no answer from {NOBODY}" in capsys.readouterr().err
    assert cli.main(["admin", "--url", NOBODY, "status", "--url", URL]) == 2
    assert "twice" in capsys.readouterr().err


def test_comparing_two_loads_asks_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["load", "compare", "a", "b", "--url", URL]) == 2
    assert "leave out --url" in capsys.readouterr().err


@pytest.fixture
def router() -> Iterator[str]:
    with answering(json.dumps({"open_requests": 7, "nodes": []}).encode()) as url:
        yield url


@pytest.mark.parametrize("form", ["status URL", "status --url URL", "--url URL status"])
def test_both_ways_lead_to_the_same_router(router: str, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["admin", *form.replace("URL", router).split()]) == 0
    assert "open requests: 7" in capsys.readouterr().out


def test_restart_of_all_takes_its_only_word_for_the_url() -> None:
    from deploy.cluster.admin import take_url_from_node

    args = argparse.Namespace(action="restart", all=True, node="h:1", address=None)
    take_url_from_node(args)
    assert (args.node, args.address) == (None, "h:1")
