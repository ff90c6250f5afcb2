"""How a drained node comes back, and the key that lets somebody drain it."""

from __future__ import annotations

import io
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy import cli
from deploy.cluster import restart as again
from deploy.cluster.admin import read_admin_key
from deploy.cluster.admin_key import ensure_key, with_admin_key
from deploy.cluster.restart_policy import RestartPolicy
from deploy.router_http import read_api_key
from shared.config.processes import ClusterConfig
from shared.config.settings.router_settings import RouterConfig
from shared.core.errors import ConfigError
from shared.core.exit_codes import EXIT_DRAINED, exit_code_after, start_again_as
from shared.observe.log import Logger


@pytest.mark.parametrize(
    ("then", "role"), [("stop", None), ("restart", "decode"), ("prefill", "prefill"), ("decode", "decode")]
)
def test_what_follows_a_drain(then: str, role: str | None) -> None:
    assert start_again_as(exit_code_after(then), "decode") == role


def test_a_drained_node_is_not_restarted() -> None:
    policy = RestartPolicy(max_restarts=5)
    assert policy.delay_after_death(0.0, EXIT_DRAINED) is None and not policy.deaths
    assert policy.delay_after_death(0.0, 1) is not None


@pytest.mark.parametrize(
    "program",
    [["python", "-P", "/baton/shared/core/launcher.py", "deploy.cli"], ["/venv/bin/python", "/venv/bin/baton"]],
)
def test_the_command_line_of_the_other_role(program: list[str]) -> None:
    own = ["decode", "--node-id=decode", "--router=tcp://127.0.0.1:1"]
    assert again.argv_as("prefill", [*program, *own], own) == [*program, "prefill", *own[1:]]


def test_a_daemon_that_wants_to_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(cli, "run_daemon", lambda command, config: exit_code_after("prefill"))
    monkeypatch.setattr(cli, "start_again", started.append)
    cli.main(["decode", "--model", "hashlm", "--router", "tcp://127.0.0.1:1"])
    assert started == ["prefill"]


def test_a_key_is_made_once_and_for_this_user_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "admin.key"
    ensure_key(path)
    key = path.read_text()
    assert len(key) > 40 and stat.S_IMODE(path.stat().st_mode) == 0o600
    ensure_key(path)
    assert path.read_text() == key and list(path.parent.iterdir()) == [path]


def test_the_launcher_names_the_key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    log = Logger("up", sys.stderr)
    named = with_admin_key(ClusterConfig(), log)
    assert named.router.admin_key_file == str(tmp_path / ".baton" / "admin.key")
    for own in (RouterConfig(admin_key_file="mine"), RouterConfig(admin_without_key=True)):
        config = ClusterConfig(router=own)
        assert with_admin_key(config, log) is config


def test_without_a_home_admin_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    config, log = ClusterConfig(), io.StringIO()
    assert with_admin_key(config, Logger("up", log)) is config
    assert "Not a directory" in log.getvalue() and "Traceback" not in log.getvalue()


def by_flag(key: Path, home: Path) -> str:
    return read_admin_key(key)


def by_default(key: Path, home: Path) -> str:
    """The launcher's own file."""
    (home / ".baton").mkdir()
    key.rename(home / ".baton" / "admin.key")
    return read_admin_key(None)


def as_a_client(key: Path, home: Path) -> str:
    return read_api_key(key)


@pytest.mark.parametrize("read", [by_flag, by_default, as_a_client])
@pytest.mark.parametrize(
    ("text", "mode", "message"), [("k", 0o600, ""), ("k", 0o644, "chmod 600"), ("\n", 0o600, "empty")]
)
def test_commands_show_no_key_that_others_may_read(
    read: Callable[[Path, Path], str],
    text: str,
    mode: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The defect: any file was taken, and one that is empty asked without a key."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_admin_key(None) == "", "there is none"
    (tmp_path / "key").write_text(text)
    (tmp_path / "key").chmod(mode)
    if not message:
        assert read(tmp_path / "key", tmp_path) == "k"
        return
    with pytest.raises(ConfigError, match=f"-key-file.*{message}"):
        read(tmp_path / "key", tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", "ftp://x", "status"], "--url"),
        (["--url", "http://127.0.0.1:9", "status"], "no answer"),
        (["restart"], "name a node, or --all"),
        (["restart", "d", "--all"], "name a node, or --all"),
        (["--admin-key-file", "/nowhere/key", "status"], "--admin-key-file"),
    ],
)
def test_admin_says_what_is_wrong(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["admin", *words]) == 2
    assert message in capsys.readouterr().err
