"""A node's list of routers from a file and from DNS, and what follows it."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shared.core.errors import ConfigError
from shared.node.routers.sources import DnsSource, FileSource, sources_of
from shared.node.routers.watch import RouterWatch
from tests.support.machine.patience import HANG_GUARD_S

HERE, THERE = "tcp://127.0.0.1:7001", "tcp://10.0.0.7:7001"


def looked_up(*addresses: str) -> Any:
    def lookup(host: str, port: int) -> Sequence[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    return lookup


def test_a_file_names_one_router_a_line(tmp_path: Path) -> None:
    file = tmp_path / "routers"
    file.write_text(f"# ours\n{HERE}\n\n  {THERE}  # the other rack\n{HERE}\n")
    assert FileSource(file, has_keys=True).read() == (HERE, THERE)


@pytest.mark.parametrize("text", ["", "# none yet\n", "127.0.0.1:7001\n", f"{HERE}\n{THERE}\n", "tcp://127.0.0.1:x\n"])
def test_a_list_that_can_t_be_dialled_is_none(tmp_path: Path, text: str) -> None:
    """Without keys nodes dial this machine only, whoever wrote the file."""
    file = tmp_path / "routers"
    file.write_text(text)
    with pytest.raises(ConfigError):
        FileSource(file, has_keys=False).read()


@pytest.mark.parametrize(
    ("addresses", "routers"),
    [
        (["10.0.0.7", "127.0.0.1", "10.0.0.7", "::1"], (THERE, HERE)),  # one with both kinds is dialled once
        (["fd00::7", "::1"], ("tcp://[::1]:7001", "tcp://[fd00::7]:7001")),
    ],
)
def test_a_name_stands_for_all_its_addresses(addresses: list[str], routers: tuple[str, ...]) -> None:
    assert DnsSource("dns://routers:7001", has_keys=True, lookup=looked_up(*addresses)).read() == routers


def test_without_keys_a_name_must_stand_for_this_machine() -> None:
    with pytest.raises(ConfigError, match="need keys"):
        DnsSource("dns://routers:7001", has_keys=False, lookup=looked_up("127.0.0.1", "10.0.0.7")).read()


def test_flags_files_and_names_make_one_list(tmp_path: Path) -> None:
    file = tmp_path / "routers"
    file.write_text(f"{THERE}\n{HERE}\n")
    fixed, sources = sources_of(("tcp://127.0.0.1:7009", "dns://localhost:7001"), str(file), has_keys=True)
    watch = RouterWatch(fixed, sources)
    assert watch.take_list() is None, "nothing was read yet"
    for source in sources:
        watch.look(source)
    taken = watch.take_list()
    assert taken is not None and taken[0] == "tcp://127.0.0.1:7009" and {HERE, THERE} < set(taken)
    assert len(set(taken)) == len(taken) and watch.take_list() is None


def test_a_file_that_is_not_there_at_the_start_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--routers-file"):
        sources_of((), str(tmp_path / "none"), has_keys=True)


def test_what_can_t_be_read_leaves_the_list_as_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "routers"
    file.write_text(HERE)
    _, [source] = sources_of((), str(file), has_keys=True)
    watch = RouterWatch((), [source])
    watch.look(source)
    assert watch.take_list() == (HERE,)
    file.write_text("")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            watch.look(source)
    assert watch.take_list() is None and len(caplog.messages) == 1 and "stays as it was" in caplog.messages[0]
    file.write_text(f"{HERE}\n{THERE}")
    watch.look(source)
    assert watch.take_list() == (HERE, THERE)


def test_a_name_server_that_hangs_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Each source has a thread, and none of them is the loop's."""
    answer, woken = threading.Event(), threading.Event()

    def lookup(host: str, port: int) -> Sequence[Any]:
        answer.wait(HANG_GUARD_S)
        raise OSError("no answer")

    file = tmp_path / "routers"
    file.write_text(HERE)
    sources = [DnsSource("dns://gone:7001", has_keys=True, lookup=lookup), FileSource(file, has_keys=True)]
    watch = RouterWatch((), sources, woken.set)
    watch.start()
    assert woken.wait(HANG_GUARD_S) and watch.take_list() == (HERE,)
    watch.close()
    answer.set()
