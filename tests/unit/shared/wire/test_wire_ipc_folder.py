"""An ipc socket lies where nobody else can reach it: file modes are all that keeps other users of the machine out."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from shared.core.errors import ConfigError
from shared.wire.zeromq.link_options import LinkOptions
from shared.wire.zeromq.sockets import RouterSocket

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


def refusal(context: Context, endpoint: str) -> str:
    """Why it is not bound; "" when it is. Closes it then: an open socket would block the end of the context."""
    try:
        router = RouterSocket(context, endpoint, LinkOptions())
    except ConfigError as error:
        return str(error)
    router.close()
    return ""


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o755, 0o777, 0o1777])
def test_a_socket_s_folder_is_nobody_else_s(context: Context, tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    assert "chmod 700" in refusal(context, f"ipc://{tmp_path}/r")
    assert not list(tmp_path.iterdir())
    tmp_path.chmod(0o700)
    router = RouterSocket(context, f"ipc://{tmp_path}/r", LinkOptions())
    is_socket = stat.S_ISSOCK((tmp_path / "r").stat().st_mode)
    router.close()
    assert is_socket


def test_a_folder_behind_a_link_is_looked_at_itself(context: Context, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    assert "chmod 700" in refusal(context, f"ipc://{tmp_path}/link/r")


def test_a_folder_of_another_user_is_refused(context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert f"belongs to uid {owner}" in refusal(context, f"ipc://{tmp_path}/r")


def test_a_socket_without_a_file_is_refused(context: Context) -> None:
    """Linux lets every user of the machine connect to an abstract socket."""
    assert "every user" in refusal(context, "ipc://@baton-test")


def test_a_socket_s_folder_must_exist(context: Context, tmp_path: Path) -> None:
    assert "No such file" in refusal(context, f"ipc://{tmp_path}/none/r")
