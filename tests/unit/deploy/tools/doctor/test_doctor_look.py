"""How the doctor gets its facts: from a router's answers, from this machine, from folders and ports."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy import cli
from deploy.router_http import RouterHttp
from deploy.router_url import parse_url
from deploy.tools.doctor.check_keys import check_keys
from deploy.tools.doctor.facts import DaemonFacts, ForeignNode, KeysFolder, SeenPair
from deploy.tools.doctor.finding import BROKEN, LOOK, OK, Finding, worst
from deploy.tools.doctor.look_daemons import command_of, find_daemons, read_daemon
from deploy.tools.doctor.look_here import (
    dial,
    governors,
    look_at_keys,
)
from deploy.tools.doctor.look_router import NoRouterError, look_at_router
from deploy.tools.doctor.visit import as_text, dial_all, key_folders, user_of
from shared.config.machine.host_memory import read_pairs
from shared.core import launcher
from shared.core.errors import ConfigError
from tests.support.clusters.key_folders import make_keys
from tests.support.worlds.doctor_facts import PAIR, cluster, machine

READY = {
    "ready": True,
    "pair": False,
    "nodes": [{"node": "d"}],
    "misfits": [{"a": "d", "b": "p", "differs": "dtype"}],
    "strangers": [{"node": "new", "role": "decode", "protocol": 14, "ours": 13}],
}
STATUS = {
    "router": {"id": "r", "epoch": "ff0000", "time": 12.5, "endpoint": "tcp://127.0.0.1:7001"},
    "open_requests": 0,
    "nodes": [{"state": "ready", "last_seen_s": 0.1, "known_s": 3.0, "hello": PAIR[1].hello, "more": 1}],
}
CUT = {"prefill": "p", "decode": "d", "endpoint": "tcp://10.0.0.2:7002", "since_s": 1.5, "tries": 2}


class Scripted(RouterHttp):
    """Answers by path; the metrics pages one after another."""

    def __init__(
        self, pages: list[str], status: tuple[int, Any] = (200, STATUS), ready: tuple[int, Any] = (200, READY)
    ):
        super().__init__(parse_url("http://127.0.0.1:1"), "")
        self.asked: list[str] = []
        self._pages, self._answers = iter(pages), {"/ready": ready, "/admin/status": status}

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        self.asked.append(path)
        if path == "/metrics":
            return 200, next(self._pages).encode()
        status, answer = self._answers[path]
        return status, msgspec.json.encode(answer)


PAGES = ["baton_open_requests 1.0", "baton_open_requests 2.0"]


def test_two_looks_with_a_pause_in_between() -> None:
    slept: list[float] = []
    http = Scripted(PAGES)
    found = look_at_router(http, "http://r", 2.5, slept.append)
    assert slept == [2.5] and http.asked == ["/metrics", "/ready", "/metrics", "/admin/status"]
    assert [look.total("baton_open_requests") for look in (found.before, found.after)] == [1, 2]
    assert (found.ready.is_ready, found.ready.is_pair, found.ready.num_nodes) == (True, False, 1)
    assert found.ready.strangers == (ForeignNode("new", 14, 13),)
    assert found.ready.misfits[0].differs == "dtype" and found.no_status == ""
    assert found.status is not None and found.status.epoch == 0xFF0000 and found.status.time_s == 12.5
    assert found.status.asked_s <= found.status.answered_s
    assert found.status.nodes[0].hello == PAIR[1].hello and found.status.nodes[0].known_s == 3.0


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ((401, {"error": {"message": "the key is wrong"}}), "answers 401: the key is wrong"),
        ((403, []), "answers 403: no reason given"),
        ((200, {"open_requests": 0, "nodes": []}), "different versions"),
    ],
)
def test_without_a_status_the_rest_is_looked_at(status: tuple[int, Any], says: str) -> None:
    found = look_at_router(Scripted(PAGES, status), "http://r", 0.0, lambda _: None)
    assert found.status is None and says in found.no_status


def test_pairs_that_can_t_connect_are_read_if_the_router_says_so() -> None:
    found = look_at_router(Scripted(PAGES), "http://r", 0.0, lambda _: None)
    assert found.status is not None and found.status.unreachable == ()
    found = look_at_router(Scripted(PAGES, (200, STATUS | {"unreachable": [CUT]})), "http://r", 0.0, lambda _: None)
    assert found.status is not None and found.status.unreachable == (SeenPair("p", "d", "tcp://10.0.0.2:7002", 1.5, 2),)


def test_what_is_no_router() -> None:
    with pytest.raises(NoRouterError, match="/ready answers 404"):
        look_at_router(Scripted(PAGES, ready=(404, {})), "http://r", 0.0, lambda _: None)
    with pytest.raises(NoRouterError, match="/ready can't be read"):
        look_at_router(Scripted(PAGES, ready=(200, {})), "http://r", 0.0, lambda _: None)


def test_a_key_that_is_none_is_told_before_it_is_sent() -> None:
    with pytest.raises(ConfigError, match="is it the right file"):
        RouterHttp(parse_url("http://127.0.0.1:1"), "two\nlines")


def test_https_needs_a_readable_authority(tmp_path: Path) -> None:
    RouterHttp(parse_url("https://router.example"), "")
    with pytest.raises(ConfigError, match="--ca"):
        RouterHttp(parse_url("https://router.example"), "", tmp_path / "none.pem")


def test_groups_and_governors_are_read_where_there_are_some(tmp_path: Path) -> None:
    (tmp_path / "cpu.stat").write_text("usage_usec 12\nnr_periods 7\nnr_throttled 3\nbroken line here\n")
    assert read_pairs(tmp_path / "cpu.stat") == {"usage_usec": 12, "nr_periods": 7, "nr_throttled": 3}
    assert read_pairs(tmp_path / "none") == {}
    (tmp_path / "cpu0" / "cpufreq").mkdir(parents=True)
    (tmp_path / "cpu0" / "cpufreq" / "scaling_driver").write_text("acpi-cpufreq\n")
    assert list(governors(tmp_path)) == []
    (tmp_path / "cpu0" / "cpufreq" / "scaling_governor").write_text("powersave\n")
    assert list(governors(tmp_path)) == [("acpi-cpufreq", "powersave")]


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (launcher.command("deploy.cli", "decode", "--threads=1"), "decode"),
        (["python", "-m", "baton_serve", "decode"], "decode"),
        (["/opt/baton/bin/python", "/opt/baton/bin/baton", "prefill"], "prefill"),
        (["baton", "router"], "router"),
        (["baton", "up"], ""),
        (["grep", "decode"], ""),
        (["baton"], ""),
        ([], ""),
    ],
)
def test_daemons_are_known_by_their_command_line(argv: list[str], command: str) -> None:
    assert command_of(argv) == command


def told(argv: list[str], folder: Path | None = Path("/")) -> DaemonFacts:
    return read_daemon(7, "decode", argv, 1000, (0, 1, 2), folder)


def test_a_daemon_s_file_is_read_as_it_reads_it(tmp_path: Path) -> None:
    """Our systemd units give nothing but --config."""
    text = '[cores]\nthreads = 2\nwait_policy = "active"\n[security]\nkeys = "k"\n[router]\nport = 1\n'
    (tmp_path / "baton.toml").write_text(text)
    found = told(["baton", "decode", "--config", "baton.toml", "--threads=1"], tmp_path)
    assert (found.threads, found.spins, found.keys, found.problem) == (1, True, str(tmp_path / "k"), "")


@pytest.mark.parametrize(
    ("words", "folder", "says"),
    [
        (["--config=/none/b.toml"], Path("/"), "there is no such file"),
        (["--config=b.toml"], None, "b.toml is relative"),
        (["--keys=k"], None, "k is relative"),
        (["--cpus=x"], Path("/"), "--cpus"),
    ],
)
def test_what_a_daemon_was_told_and_can_t_be_known_is_told(words: list[str], folder: Path | None, says: str) -> None:
    found = told(["baton", "decode", "--threads=2", *words], folder)
    assert says in found.problem and found.keys == ""
    assert found.threads == (2 if "--cpus=x" not in words else 0)


def test_a_home_is_the_daemon_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/asks")
    assert read_daemon(7, "decode", ["--keys=~/k"], os.geteuid(), (0,), None).keys == "/home/asks/k"
    other = next(one for one in pwd.getpwall() if one.pw_uid != os.geteuid() and one.pw_dir.startswith("/"))
    found = read_daemon(7, "decode", ["--keys=~/k"], other.pw_uid, (0,), None)
    assert found.keys == f"{pwd.getpwuid(other.pw_uid).pw_dir.rstrip('/')}/k"


def test_daemons_that_run_are_found_with_their_cores() -> None:
    """The program does nothing: its argv is what counts."""
    argv = [sys.executable, "-c", "input()", "deploy.cli", "decode", "--threads=3"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as process:
        found = next(one for one in find_daemons() if one.pid == process.pid)
        process.communicate(b"\n")
    assert (found.command, found.threads, found.uid) == ("decode", 3, os.geteuid())
    assert found.cores == tuple(sorted(os.sched_getaffinity(0)))


def seen(folder: Path, uid: int | None = None) -> KeysFolder:
    return look_at_keys(folder, os.geteuid() if uid is None else uid)


def modes(found: KeysFolder) -> set[int]:
    return {secret.mode for secret in found.secrets}


def test_secrets_that_nodes_would_take_and_would_not(tmp_path: Path) -> None:
    folder = make_keys(tmp_path / "keys")
    found = seen(folder)
    assert found.problem == "" and {Path(one.path).name for one in found.secrets} >= {"keys", "allowed", "p.secret"}
    assert found.is_open and modes(found) == {0o700, 0o600}
    (folder / "p.secret").chmod(0o640)
    found = seen(folder)
    assert "chmod 600" in found.problem and modes(found) == {0o700, 0o600, 0o640}
    (folder / "p.secret").chmod(0o600)
    (folder / "allowed").write_text("")
    assert "does not list the key of" in seen(folder).problem
    found = seen(tmp_path / "none")
    assert len(found.secrets) == 1 and found.secrets[0].error and found.problem


SOMEBODY = 54321


@pytest.mark.skipif(os.geteuid() != 0, reason="only root looks at other users' keys")
def test_root_judges_a_service_s_keys_as_the_service_would() -> None:
    """Not under pytest's own folder: that is closed to others."""
    with tempfile.TemporaryDirectory() as top:
        Path(top).chmod(0o755)
        folder = make_keys(Path(top) / "keys")
        for path in (folder, *folder.iterdir()):
            os.chown(path, SOMEBODY, SOMEBODY)
        assert user_of(folder) == SOMEBODY and key_folders(folder, machine()) == [(folder, SOMEBODY)]
        assert worst(check_keys([seen(folder, SOMEBODY)])) == OK
        others = {folder / "p.secret": 0, folder / "allowed": SOMEBODY + 1}
        for path, uid in others.items():
            os.chown(path, uid, uid)
        found = check_keys([seen(folder, SOMEBODY)])
        assert {one.advice for one in found} == {f"chown {SOMEBODY} {path}" for path in others}
        assert os.geteuid() == 0


def test_other_users_keys_are_closed_to_who_is_not_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(uid: int) -> None:
        if uid != os.geteuid():
            raise PermissionError

    monkeypatch.setattr(os, "seteuid", refuse)
    found = seen(make_keys(tmp_path / "keys"), SOMEBODY)
    assert not found.is_open and len(found.secrets) == 1


@pytest.fixture
def listener() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


def test_knocking_at_ports(listener: str, tmp_path: Path) -> None:
    there = dial("d", f"{listener}#abcd")
    assert (there.error, there.endpoint) == ("", listener) and there.seconds < 3
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert dial("d", f"tcp://127.0.0.1:{closed.getsockname()[1]}").error == "Connection refused"
    assert dial("d", f"ipc://{tmp_path / 'none'}").error == "No such file or directory"


def test_only_ports_that_mean_something_here_are_knocked_at() -> None:
    def whose(router_host: str) -> list[str]:
        return [found.whose for found in dial_all(cluster(), router_host, ["tcp://127.0.0.1:9"])]

    assert whose("127.0.0.1") == ["router", "prefill-0", "decode-0", "--dial"]
    assert whose("far.example") == ["--dial"]


def test_keys_folders_are_the_given_one_or_those_in_use() -> None:
    used = machine(*(read_daemon(i, "decode", ["--keys=/k"], uid, (0,), None) for i, uid in enumerate((7, 7, 8))))
    assert key_folders(Path("/mine"), used) == [(Path("/mine"), os.geteuid())]
    assert key_folders(Path("/k/../k"), used) == [(Path("/k/../k"), 7), (Path("/k/../k"), 8)]
    assert key_folders(None, used) == [(Path("/k"), 7), (Path("/k"), 8)] and key_folders(None, machine()) == []


FINDINGS = [
    Finding("cpu", "here", OK, "fine"),
    Finding("ports", "d", BROKEN, "nobody answers", "start it"),
    Finding("disk", "/", LOOK, "full", "make room"),
]


def test_the_worst_comes_first_with_what_to_do() -> None:
    assert as_text(FINDINGS).splitlines() == [
        "BROKEN  ports      d: nobody answers",
        "        what to do: start it",
        "look    disk       /: full",
        "        what to do: make room",
        "ok      cpu        here: fine",
        "",
        "in all: 1 broken, 1 look, 1 ok",
    ]
    assert worst(FINDINGS) == BROKEN and worst([]) == OK


@pytest.mark.parametrize("words", [["--interval", "0"], ["--dial", "10.0.0.1"], ["--url", "x"]])
def test_flags_that_make_no_sense(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *words]) == 2
    assert words[0] in capsys.readouterr().err
