"""Users without a home: containers run with any user id, or with a home that they can't write."""

from __future__ import annotations

import logging
import os
import pwd
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from shared.config.machine import home
from shared.config.machine.cache_folder import kernels_folder
from shared.kernel.code import kept_code
from tests.support.machine.patience import HANG_GUARD_S

ROOT = Path(__file__).resolve().parents[4]
NOBODY = 12345  # as OpenShift gives them: no entry in the password file


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(home.tempfile, "gettempdir", lambda: str(tmp_path))
    for variable in (home.TRITON_CACHE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(home.os, "environ", os.environ.copy())  # `prepare_home` writes into it
    return tmp_path


def without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> object:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    home.os.environ.pop("HOME", None)


def test_who_has_no_home_gets_a_private_one(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_home(monkeypatch)
    for _ in range(2):
        home.prepare_home()
        own = Path(home.os.environ["HOME"])
        assert own == Path.home() == temporary / f"baton-{os.geteuid()}"
        assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert home.TRITON_CACHE not in home.os.environ


def test_who_has_a_home_keeps_it(temporary: Path) -> None:
    home.os.environ["HOME"] = str(temporary)
    home.prepare_home()
    assert home.os.environ["HOME"] == str(temporary) and not list(temporary.iterdir())


@pytest.mark.parametrize("kind", ["open", "link", "file", "foreign"])
def test_a_folder_of_others_is_no_home(kind: str, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user may have made it first, to plant code or a key there."""
    folder = temporary / f"baton-{os.geteuid()}"
    if kind == "open":
        folder.mkdir()
        folder.chmod(0o770)
    elif kind == "link":
        (temporary / "other").mkdir(mode=0o700)
        folder.symlink_to(temporary / "other")
    elif kind == "file":
        folder.touch()
    else:
        folder.mkdir(mode=0o700)
        monkeypatch.setattr(home.os, "geteuid", lambda: folder.stat().st_uid + 1)
        folder.rename(temporary / f"baton-{home.os.geteuid()}")
    without_home(monkeypatch)
    home.prepare_home()
    assert home.os.environ["HOME"] == "/"
    with pytest.raises(OSError):
        home.private_folder()


def test_a_home_that_is_not_writable_is_passed_by(temporary: Path, caplog: pytest.LogCaptureFixture) -> None:
    (temporary / "file").touch()
    home.os.environ["HOME"] = str(temporary / "file")
    home.prepare_home()
    private = temporary / f"baton-{os.geteuid()}"
    assert home.os.environ["HOME"] == str(temporary / "file"), "it may hold keys and models to read"
    assert home.os.environ[home.TRITON_CACHE] == str(private / "triton")
    assert kernels_folder() == private / "kernels"
    with caplog.at_level(logging.WARNING):
        assert kept_code.chosen_folder() == private / "kernels"
    assert f"compiled kernels are kept in {private}/kernels: " in caplog.text and "XDG_CACHE_HOME" in caplog.text


def test_triton_s_own_folder_wins(temporary: Path) -> None:
    (temporary / "file").touch()
    home.os.environ.update(HOME=str(temporary / "file"), TRITON_CACHE_DIR="/mine")
    home.prepare_home()
    assert home.os.environ[home.TRITON_CACHE] == "/mine"


def test_code_that_is_not_ours_is_kept_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout may belong to another user."""
    assert kept_code.is_own_checkout()
    monkeypatch.setattr(kept_code.os, "access", lambda *_: False)
    assert not kept_code.is_own_checkout()


# ---- as such a user

SETPRIV = shutil.which("setpriv")
AS_NOBODY = ["--reuid", str(NOBODY), "--regid", "0", "--clear-groups"]
READS_ALL = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]  # Python may lie in root's home
COMMANDS = {  # words -> the last line's beginning
    "cache": "no packed weights in ",
    "doctor": "in all: ",
    "admin status": "baton admin: no answer from ",
    "ray status": "baton ray: ",
    "router --model org/name --offline --port 0": "baton router: --model org/name: offline, and the cache ",
    "prefill --model org/name --offline --router tcp://127.0.0.1:1": "baton prefill: --model org/name: offline, and ",
    "up --model org/name --offline --port 0": "baton up: --model org/name: offline, and the cache ",
}


@pytest.mark.skipif(os.geteuid() != 0 or SETPRIV is None, reason="only root becomes another user")
@pytest.mark.parametrize(
    ("words", "kind"),
    [*((words, "none") for words in COMMANDS), *((words, "read-only") for words in COMMANDS if "--offline" in words)],
)
def test_each_command_says_one_thing_without_a_home(words: str, kind: str, tmp_path: Path) -> None:
    """No traceback, and no folder with the name `~` in the current one."""
    own, current, temporary = tmp_path / "home", tmp_path / "here", tmp_path / "tmp"
    for folder, mode in ((own, 0o555), (current, 0o777), (temporary, 0o777)):
        folder.mkdir()
        folder.chmod(mode)
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    variables |= {"HOME": str(own)} if kind == "read-only" else {}
    assert SETPRIV is not None
    run = subprocess.run(
        [SETPRIV, *AS_NOBODY, *READS_ALL, sys.executable, "-B", "-m", "deploy.cli", *words.split()],
        cwd=current,
        env=variables,
        capture_output=True,
        text=True,
        timeout=HANG_GUARD_S,
    )
    said = run.stdout + run.stderr
    assert "Traceback" not in said, said
    assert said.strip().splitlines()[-1].startswith(COMMANDS[words]), said
    assert not list(current.iterdir()) and not list(own.iterdir())
